#define MOEFFN_NS backward_avx512_bf16_set
#define MOEFFN_WIDTH 16
#define MOEFFN_PANEL_ROWS 12
#include "backward_set.h"

namespace moeffn {

const BackwardKernels* backward_avx512_bf16(DType x, DType w) {
  if (x == DType::bf16 && w != DType::f16) return backward_avx512_bf16_set::backward_table<backward_avx512_bf16_set::PairWords>("avx512_bf16");
  return backward_avx512(x, w);
}

}  // namespace moeffn
