#define MOEFFN_NS backward_avx2_set
#define MOEFFN_WIDTH 8
#define MOEFFN_PANEL_ROWS 6
#include "backward_set.h"

namespace moeffn {

const BackwardKernels* backward_avx2(DType, DType) {
  return backward_avx2_set::backward_table<backward_avx2_set::FloatWords>("avx2");
}

}  // namespace moeffn
