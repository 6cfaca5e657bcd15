// All of the forward for one instruction set. Included by each isa_<set>.cpp, which sets MOEFFN_NS and MOEFFN_WIDTH.
// The order matters.
#include <type_traits>

#include "kernels.h"
#include "vec.h"

#include "act.h"
#include "lanes.h"

#include "products.h"

#include "tile.h"

#include "finish.h"

#include "logits.h"

#include "ffn.h"
#include "probe.h"
