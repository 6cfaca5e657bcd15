#define MOEFFN_NS backward_amx_set
#define MOEFFN_WIDTH 16
#define MOEFFN_TILES
#include <type_traits>

#include "backward_kernels.h"
#include "vec.h"

#include "act.h"
#include "tiles.h"

namespace moeffn {
namespace MOEFFN_NS {
constexpr int kPanelRows = 32;
}
}  // namespace moeffn

#include "backward_act.h"
#include "backward_pack.h"

#include "backward_products.h"

#include "backward_table.h"

namespace moeffn {

const BackwardKernels* backward_amx(DType x, DType w) {
  if (x == DType::bf16 && w != DType::f16) return backward_amx_set::backward_table<backward_amx_set::PairWords>("amx");
  return backward_avx512(x, w);
}

}  // namespace moeffn
