#define MOEFFN_NS backward_avx512_set
#define MOEFFN_WIDTH 16
#define MOEFFN_PANEL_ROWS 12
#include "backward_set.h"

namespace moeffn {

const BackwardKernels* backward_avx512(DType, DType) {
  return backward_avx512_set::backward_table<backward_avx512_set::FloatWords>("avx512");
}

}  // namespace moeffn
