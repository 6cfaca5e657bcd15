#define MOEFFN_NS backward_amx_set
#define MOEFFN_WIDTH 16
#define MOEFFN_PANEL_ROWS 32
#define MOEFFN_TILES
#include "backward_set.h"

namespace moeffn {

const BackwardKernels* backward_amx(DType x, DType w) {
  if (x == DType::bf16 && w != DType::f16) return backward_amx_set::backward_table<backward_amx_set::PairWords>("amx");
  return backward_avx512(x, w);
}

}  // namespace moeffn
