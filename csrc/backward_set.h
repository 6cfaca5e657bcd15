// All of the backward for one instruction set. Included by each backward_<set>.cpp, which sets MOEFFN_NS, MOEFFN_WIDTH and
// MOEFFN_PANEL_ROWS (rows of a packed panel of A), and MOEFFN_TILES where there are AMX tiles. The order matters.
#include <type_traits>

#include "backward_kernels.h"
#include "vec.h"

#include "act.h"
#include "lanes.h"

#include "backward_act.h"
#include "backward_pack.h"

#include "backward_products.h"

#include "backward_table.h"
