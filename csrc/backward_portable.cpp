#define MOEFFN_NS backward_portable_set
#define MOEFFN_WIDTH 4
#include <type_traits>

#include "backward_kernels.h"
#include "vec.h"

#include "act.h"
#include "tiles.h"

namespace moeffn {
namespace MOEFFN_NS {
constexpr int kPanelRows = 4;
}
}  // namespace moeffn

#include "backward_act.h"
#include "backward_pack.h"

#include "backward_products.h"

#include "backward_table.h"

namespace moeffn {

const BackwardKernels* backward_portable(DType, DType) {
  return backward_portable_set::backward_table<backward_portable_set::FloatWords>("portable");
}

}  // namespace moeffn
