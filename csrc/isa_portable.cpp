#define MOEFFN_NS portable
#define MOEFFN_WIDTH 4
#include <type_traits>

#include "kernels.h"
#include "vec.h"

#include "act.h"
#include "tiles.h"

#include "ffn.h"

namespace moeffn {

const Kernels* kernels_portable(DType, DType w) { return portable::float_table(w, "portable"); }

}  // namespace moeffn
