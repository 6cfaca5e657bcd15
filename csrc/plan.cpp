#include "plan.h"

#include "problem.h"

namespace moeffn {

void make_plan(const int32_t* experts, int64_t N, int64_t E, int32_t* counts, int32_t* offsets, int32_t* slot_of_row,
               int32_t* row_of_slot) {
  if (N > INT32_MAX) throw BadArgument("experts: expected at most 2^31 - 1 slots, got " + std::to_string(N));
  for (int64_t e = 0; e <= E; ++e) offsets[e] = 0;
  const uint32_t known = static_cast<uint32_t>(E < INT32_MAX ? E : INT32_MAX);
  for (int64_t s = 0; s < N; ++s)
    if (static_cast<uint32_t>(experts[s]) < known) ++offsets[experts[s] + 1];
  for (int64_t e = 0; e < E; ++e) {
    if (counts) counts[e] = offsets[e + 1];
    offsets[e + 1] += offsets[e];
  }
  // offsets[e] walks to the end of expert e, which is where e + 1 starts; shifted back afterwards.
  for (int64_t s = 0; s < N; ++s) {
    const int32_t e = experts[s];
    if (static_cast<uint32_t>(e) < known) {
      const int32_t row = offsets[e]++;
      slot_of_row[row] = static_cast<int32_t>(s);
      row_of_slot[s] = row;
    } else {
      row_of_slot[s] = -1;
    }
  }
  for (int64_t e = E; e > 0; --e) offsets[e] = offsets[e - 1];
  offsets[0] = 0;
  for (int64_t r = E > 0 ? offsets[E] : 0; r < N; ++r) slot_of_row[r] = -1;
}

void check_plan(const Plan& plan, int64_t N, int64_t E) {
  int32_t last = 0;
  for (int64_t e = 0; e <= E; ++e) {
    if (plan.offsets[e] < last || plan.offsets[e] > N || (e == 0 && plan.offsets[0] != 0))
      throw BadArgument("plan.offsets: expected values that rise from 0 to at most " + std::to_string(N) + ", got " +
                        std::to_string(plan.offsets[e]) + " at " + std::to_string(e));
    last = plan.offsets[e];
  }
  if (plan.slot_of_row)
    for (int64_t r = 0; r < last; ++r)
      if (plan.slot_of_row[r] < 0 || plan.slot_of_row[r] >= N)
        throw BadArgument("plan.slot_of_row: expected values in [0, " + std::to_string(N) + "), got " +
                          std::to_string(plan.slot_of_row[r]) + " at " + std::to_string(r));
}

}  // namespace moeffn
