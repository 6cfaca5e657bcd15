#define MOEFFN_NS avx512
#define MOEFFN_WIDTH 16
#include <type_traits>

#include "kernels.h"
#include "vec.h"

#include "act.h"
#include "tiles.h"

#include "ffn.h"

namespace moeffn {

const Kernels* kernels_avx512(DType, DType w) { return avx512::float_table(w, "avx512"); }

}  // namespace moeffn
