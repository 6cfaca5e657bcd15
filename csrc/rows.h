#pragma once
#include "problem.h"

namespace moeffn {

// Rows that came home from other ranks, summed for each token: y[t] = first[t] + the rows that index[t] names, in that
// order, in float32, rounded once. float32 or bfloat16.
struct RowSum {
  int64_t T = 0, R = 0, D = 0;
  DType dtype = DType::f32;
  const char* rows = nullptr;      // S rows of D values, row_bytes apart
  int64_t S = 0, row_bytes = 0;
  const int32_t* index = nullptr;  // (T, R); negative: no row
  const char* first = nullptr;     // T rows of D values, first_bytes apart, or nullptr
  int64_t first_bytes = 0;
  char* y = nullptr;               // (T, D)
};

// Throws BadArgument for an index beyond the rows.
void sum_rows(const RowSum& s);

}  // namespace moeffn
