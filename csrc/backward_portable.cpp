#define MOEFFN_NS backward_portable_set
#define MOEFFN_WIDTH 4
#define MOEFFN_PANEL_ROWS 4
#include "backward_set.h"

namespace moeffn {

const BackwardKernels* backward_portable(DType, DType) {
  return backward_portable_set::backward_table<backward_portable_set::FloatWords>("portable");
}

}  // namespace moeffn
