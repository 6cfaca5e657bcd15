#define MOEFFN_NS backward_avx2_set
#define MOEFFN_WIDTH 8
#include <type_traits>

#include "backward_kernels.h"
#include "vec.h"

#include "act.h"
#include "tiles.h"

namespace moeffn {
namespace MOEFFN_NS {
constexpr int kPanelRows = 6;
}
}  // namespace moeffn

#include "backward_act.h"
#include "backward_pack.h"

#include "backward_products.h"

#include "backward_table.h"

namespace moeffn {

const BackwardKernels* backward_avx2(DType, DType) {
  return backward_avx2_set::backward_table<backward_avx2_set::FloatWords>("avx2");
}

}  // namespace moeffn
