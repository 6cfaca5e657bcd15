#pragma once
#include <cstdint>

namespace moeffn {

// Stable counting sort of experts (N,) by id; ids outside [0, E) are dropped. Writes counts (E,), offsets (E + 1,),
// slot_of_row (N,) with -1 from offsets[E] on, row_of_slot (N,) with -1 for dropped slots. counts may be nullptr.
void make_plan(const int32_t* experts, int64_t N, int64_t E, int32_t* counts, int32_t* offsets, int32_t* slot_of_row,
               int32_t* row_of_slot);

// Throws BadArgument unless offsets rise from 0 to at most N and the maps stay inside; so no kernel reads out of bounds.
void check_plan(const struct Plan& plan, int64_t N, int64_t E);

}  // namespace moeffn
