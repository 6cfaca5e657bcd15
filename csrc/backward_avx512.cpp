#define MOEFFN_NS backward_avx512_set
#define MOEFFN_WIDTH 16
#include <type_traits>

#include "backward_kernels.h"
#include "vec.h"

#include "act.h"
#include "tiles.h"

namespace moeffn {
namespace MOEFFN_NS {
constexpr int kPanelRows = 12;
}
}  // namespace moeffn

#include "backward_act.h"
#include "backward_pack.h"

#include "backward_products.h"

#include "backward_table.h"

namespace moeffn {

const BackwardKernels* backward_avx512(DType, DType) {
  return backward_avx512_set::backward_table<backward_avx512_set::FloatWords>("avx512");
}

}  // namespace moeffn
