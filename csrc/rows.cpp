// Memory decides here, so plain loops that the compiler turns into vectors of the least common instruction set will do.
#include "rows.h"

#include <algorithm>
#include <cstring>

#include "threads.h"

namespace moeffn {
namespace {

constexpr int64_t kColumns = 512;  // sums that stay in the first-level cache

float wide(float v) { return v; }
float wide(bf16 v) {
  const uint32_t bits = static_cast<uint32_t>(v.bits) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

void narrow(float v, float& out) { out = v; }
void narrow(float v, bf16& out) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  const uint32_t even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out.bits = static_cast<uint16_t>(v != v ? 0x7fc0 : even);
}

template <class X>
void sum_token(const RowSum& s, int64_t t) {
  const int32_t* index = s.index + t * s.R;
  X* y = reinterpret_cast<X*>(s.y) + t * s.D;
  float total[kColumns];
  for (int64_t d = 0; d < s.D; d += kColumns) {
    const int64_t n = std::min(kColumns, s.D - d);
    bool begun = false;
    auto add = [&](const char* row) {
      const X* x = reinterpret_cast<const X*>(row) + d;
      if (begun) {
        for (int64_t i = 0; i < n; ++i) total[i] += wide(x[i]);
      } else {
        for (int64_t i = 0; i < n; ++i) total[i] = wide(x[i]);
      }
      begun = true;
    };
    if (s.first) add(s.first + t * s.first_bytes);
    for (int64_t k = 0; k < s.R; ++k)
      if (index[k] >= 0) add(s.rows + index[k] * s.row_bytes);
    if (!begun) std::fill(total, total + n, 0.0f);
    for (int64_t i = 0; i < n; ++i) narrow(total[i], y[d + i]);
  }
}

}  // namespace

void sum_rows(const RowSum& s) {
  for (int64_t i = 0; i < s.T * s.R; ++i)
    if (s.index[i] >= s.S)
      throw BadArgument("rows_of_token: expected values below " + std::to_string(s.S) + ", got " + std::to_string(s.index[i]));
  const int threads = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(max_threads(), s.T / 8)));
  parallel(threads, [&](int thread, int all) {
    for (int64_t t = s.T * thread / all; t < s.T * (thread + 1) / all; ++t)
      s.dtype == DType::f32 ? sum_token<float>(s, t) : sum_token<bf16>(s, t);
  });
}

}  // namespace moeffn
