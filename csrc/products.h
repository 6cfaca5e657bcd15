// The inner products, for one instruction set: register-blocked kernels that broadcast the weights as they lie, and dot
// products for few rows. Included after lanes.h, in the same namespace.
//
// Products are taken transposed: C (weight rows x tokens) += W (weight rows x lanes) · panel (lanes x tokens). A vector
// holds one lane of W tokens, a lane of a weight row is broadcast from memory, and so row-major weights need no packed
// copy; only the tokens, far fewer, are turned into panels.

namespace moeffn {
namespace MOEFFN_NS {

#if MOEFFN_WIDTH == 16
constexpr int kVectors = 4;       // of tokens in a panel, at most
constexpr int kAccumulators = 24;
#elif defined(__AVX2__)
constexpr int kVectors = 2;
constexpr int kAccumulators = 12;
#else
constexpr int kVectors = 2;
constexpr int kAccumulators = 8;
#endif
constexpr int64_t kDotLimit = 8;  // up to so many rows the dot form alone, which reads each byte of the weights once
constexpr int kDotRows = 6;    // tokens at once in the dot form, beside kStreams weight rows
constexpr int kStreams = 4;    // weight rows read at once by the dot form
constexpr int kMoreStreams = MOEFFN_WIDTH == 16 ? 8 : kStreams;  // the same for up to three tokens
constexpr int kSomeStreams = MOEFFN_WIDTH == 16 ? 6 : kStreams;  // for four: 4 % faster than four streams

// Tokens whose sums with so many weight rows fit the registers.
constexpr int most_rows(int streams) { return kDotRows * kStreams / streams; }
constexpr int kChunk = 96;     // weight rows multiplied before their sums are used: whole groups, also when half are gates
// Of a panel, in use at a time: streams from L2, beside as many weights. Pieces that fit L1 spend 7 % on their sums, and
// walk the weights in runs too short to be prefetched.
constexpr int64_t kPanelBytes = 256 << 10;
constexpr int64_t kWideLanes = 512;  // of weights that are widened first, at a time

// Terms that one accumulator sums at most before it is added to another: rounding errors grow with their number.
constexpr int64_t kBlockTerms = 512, kDotVectors = 512, kColumnTerms = 128;

// Weight rows whose sums fill the registers, beside a panel of so many vectors.
constexpr int group_rows(int vectors) { return kAccumulators / vectors < 16 ? kAccumulators / vectors : 16; }

// Bytes that the dot form asks for ahead, in all streams together. On processors with AMX 8 KiB bring decoding from 26 to
// 30 GB/s with four streams, and to 31 with eight (nothing: 10 % slower; 96 KiB: 15 %); on Zen 4 any distance costs 3 to
// 15 %.
#ifndef MOEFFN_STREAM_AHEAD
#define MOEFFN_STREAM_AHEAD 0
#endif
constexpr int64_t kStreamAhead = MOEFFN_STREAM_AHEAD;

// Weight rows that lie `stride` bytes apart.
struct Strip {
  const char* data;
  int64_t stride;
};

MOEFFN_INLINE vf broadcast(const char* p) {
  float lane;
  memcpy(&lane, p, sizeof lane);
  return splat(lane);
}

// c (M, V*W) (+)= M weight rows · panel (lanes, V*W). Nothing is asked for ahead: the rows are walked far enough for the
// processor's own prefetchers to follow, and software's requests, which hold the few buffers of L1, make them slower (10 %
// at 32 tokens an expert).
template <class L, int M, int V>
static void block_kernel(Strip w, const float* panel, int64_t lanes, float* c, bool first) {
  constexpr int kBases = (M + 3) / 4;  // four rows are addressed from one register: base + {0, 1, 2, 3} strides
  const char* base[kBases];
#pragma GCC unroll 4
  for (int i = 0; i < kBases; ++i) base[i] = w.data + 4 * i * w.stride;
  const int64_t at[4] = {0, w.stride, 2 * w.stride, 3 * w.stride};
  for (int64_t k = 0; k < lanes; k += kBlockTerms, first = false) {
    vf acc[M][V];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[m][v] = splat(0.0f);
    for (int64_t i = least(kBlockTerms, lanes - k); i > 0; --i) {
      vf b[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) b[v] = load(panel + v * W);
      panel += V * W;
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const vf a = broadcast(base[m / 4] + at[m % 4]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[m][v] = L::mac(a, b[v], acc[m][v]);
      }
#pragma GCC unroll 4
      for (int j = 0; j < kBases; ++j) base[j] += 4;
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        float* to = c + (m * V + v) * W;
        store(to, first ? acc[m][v] : load(to) + acc[m][v]);
      }
  }
}

template <class L, int V, int M = group_rows(V)>
static void block_rows(int64_t rows, Strip w, const float* panel, int64_t lanes, float* c, bool first) {
  if constexpr (M > 1) {
    if (rows < M) return block_rows<L, V, M - 1>(rows, w, panel, lanes, c, first);
  }
  block_kernel<L, M, V>(w, panel, lanes, c, first);
}

// c (n, V*W) (+)= n weight rows · panel, in balanced groups of rows.
template <class L, int V>
static void strip_product(int64_t n, Strip w, const float* panel, int64_t lanes, float* c, bool first) {
  const int64_t groups = (n + group_rows(V) - 1) / group_rows(V);
  for (int64_t g = 0, r = 0; g < groups; ++g) {
    const int64_t rows = n * (g + 1) / groups - r;
    block_rows<L, V>(rows, {w.data + r * w.stride, w.stride}, panel, lanes, c + r * V * W, first);
    r += rows;
  }
}

// Calls f with a compile-time number of vectors.
template <int V = kVectors, class Fn>
MOEFFN_INLINE void with_vectors(int64_t vectors, const Fn& f) {
  if constexpr (V > 1) {
    if (vectors < V) return with_vectors<V - 1>(vectors, f);
  }
  f(std::integral_constant<int, V>());
}

// The sums of four vectors.
MOEFFN_INLINE void sum4(const vf* v, float* out) {
#if MOEFFN_WIDTH == 16
  auto pairs = [](vf a, vf b) {  // per 128 bits: a0 + a2, b0 + b2, a1 + a3, b1 + b3
    return (vf)_mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  };
  const __m512 x = (__m512)pairs(v[0], v[1]), y = (__m512)pairs(v[2], v[3]);
  const __m512 z = _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xee));
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(z), _mm512_extractf32x8_ps(z, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
#endif
}

// out[m][s] = tile row m · weight row s, for S weight rows walked side by side.
template <class L, class WT, int M, int S>
static void dot_kernel(const float* tile, int64_t stride, const WT* const* rows, int64_t elems, float* out) {
  vf acc[M][S];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int s = 0; s < S; ++s) acc[m][s] = splat(0.0f);
  const WT* r[S];
#pragma GCC unroll 8
  for (int s = 0; s < S; ++s) r[s] = rows[s];
  const int64_t step = W * L::kPerLane, full = elems / step * step;
  auto add = [&](auto lanes, const float* x) __attribute__((always_inline)) {
    vf a[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) a[m] = load(x + m * stride);
#pragma GCC unroll 8
    for (int s = 0; s < S; ++s) {
      const vf w = lanes(s);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) acc[m][s] = L::mac(a[m], w, acc[m][s]);
    }
  };
  const float* x = tile;
  for (int64_t k = 0; k < full; k += step, x += W) {
    if constexpr (kStreamAhead > 0)
#pragma GCC unroll 8
      for (int s = 0; s < S; ++s) __builtin_prefetch(reinterpret_cast<const char*>(r[s] + k) + kStreamAhead / S);
    add([&](int s) __attribute__((always_inline)) { return L::lanes(r[s] + k); }, x);
  }
  if (full < elems) add([&](int s) __attribute__((always_inline)) { return L::lanes_part(r[s] + full, elems - full); }, x);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int s = 0; s < S; s += 4) {
      if (s + 4 <= S) {
        sum4(&acc[m][s], out + m * S + s);
      } else {  // in the same order
        vf rest[4] = {};
        float sums[4];
        for (int i = s; i < S; ++i) rest[i - s] = acc[m][i];
        sum4(rest, sums);
        for (int i = s; i < S; ++i) out[m * S + i] = sums[i - s];
      }
    }
}

template <class L, class WT, int S, int M = kDotRows>
static void dot_some(int64_t rows, const float* tile, int64_t stride, const WT* const* weights, int64_t elems, float* out) {
  if constexpr (M > 1) {
    if (rows < M || M > most_rows(S)) return dot_some<L, WT, S, M - 1>(rows, tile, stride, weights, elems, out);
  }
  dot_kernel<L, WT, M, S>(tile, stride, weights, elems, out);
}

// out (rows, S) = tile · the S weight rows, kDotVectors vectors at a time. The second pass over the rows finds the weights
// in L1.
template <class L, class WT, int S>
static void dot_rows(int64_t rows, const float* tile, int64_t stride, const WT* const* weights, int64_t elems, float* out) {
  const int64_t passes = (rows + most_rows(S) - 1) / most_rows(S), most = kDotVectors * W * L::kPerLane;
  for (int64_t k = 0; k < elems; k += most) {
    const WT* from[S];
    for (int s = 0; s < S; ++s) from[s] = weights[s] + k;
    float part[kDotLimit * S];
    float* to = k == 0 ? out : part;
    for (int64_t i = 0, m = 0; i < passes; ++i) {
      const int64_t n = rows * (i + 1) / passes - m;
      dot_some<L, WT, S>(n, tile + m * stride + k / L::kPerLane, stride, from, least(most, elems - k), to + m * S);
      m += n;
    }
    for (int64_t i = 0; k > 0 && i < rows * S; ++i) out[i] += part[i];
  }
}

// Few rows by a transposed matrix: its columns lie side by side, so c (M, n) += x (M, R) · w (R, n), without turning.
template <class L, class WT, int M, int R>
static void column_kernel(const typename L::Elem* x, int64_t x_stride, const WT* w, int64_t stride, int64_t n, float* c,
                          int64_t c_stride, bool first) {
  vf a[M][R];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) a[m][r] = splat(get(x + m * x_stride + r));
  for (int64_t i = 0; i < n; i += W) {
    const int64_t left = n - i;
    vf b[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      b[r] = load_upto(w + r * stride + i, left);
      __builtin_prefetch(w + (r + R) * stride + i);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      float* to = c + m * c_stride + i;
      vf total = first ? splat(0.0f) : load_upto(to, left);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) total = fma(a[m][r], b[r], total);
      store_upto(to, total, left);
    }
  }
}

constexpr int kColumnRows = 4;  // rows of the tile, and rows of the matrix, at once
constexpr int64_t kColumnSums = 4 << 10;

template <class L, class WT, int R, int M = kColumnRows>
static void column_rows(int64_t rows, const typename L::Elem* x, int64_t x_stride, const WT* w, int64_t stride, int64_t n,
                        float* c, int64_t c_stride, bool first) {
  if constexpr (M > 1) {
    if (rows < M) return column_rows<L, WT, R, M - 1>(rows, x, x_stride, w, stride, n, c, c_stride, first);
  }
  for (int64_t m = 0; m + M <= rows; m += M)
    column_kernel<L, WT, M, R>(x + m * x_stride, x_stride, w, stride, n, c + m * c_stride, c_stride, first);
  if (rows % M)
    column_rows<L, WT, R, M>(rows % M, x + rows / M * M * x_stride, x_stride, w, stride, n, c + rows / M * M * c_stride,
                             c_stride, first);
}

// c (rows, n) = tile rows · n columns of a matrix whose rows (one an element of the tile) lie `stride` elements apart. The
// sums in use, of kColumnTerms rows of the matrix at a time, stay in L1.
template <class L, class WT>
static void column_product(int64_t rows, const float* tile, int64_t elems, const WT* w, int64_t stride, int64_t n, float* c) {
  const auto* x = reinterpret_cast<const typename L::Elem*>(tile);
  const int64_t x_stride = row_lanes<L>(elems) * L::kPerLane, some = kColumnSums / rows / W * W;
  alignas(64) float part[kColumnSums];
  for (int64_t i = 0; i < n; i += some) {
    const int64_t width = least(some, n - i);
    for (int64_t k0 = 0, k = 0; k0 < elems; k0 += kColumnTerms) {
      const int64_t end = least(elems, k0 + kColumnTerms);
      float* to = k0 == 0 ? c + i : part;
      const int64_t pitch = k0 == 0 ? n : width;
      for (; k + kColumnRows <= end; k += kColumnRows)
        column_rows<L, WT, kColumnRows>(rows, x + k, x_stride, w + k * stride + i, stride, width, to, pitch, k == k0);
      for (; k < end; ++k)
        column_rows<L, WT, 1>(rows, x + k, x_stride, w + k * stride + i, stride, width, to, pitch, k == k0);
      for (int64_t m = 0; k0 > 0 && m < rows; ++m)
        for (int64_t j = 0; j < width; j += W) {
          float* sum = c + m * n + i + j;
          store_upto(sum, load_upto(sum, width - j) + load_upto(part + m * width + j, width - j), width - j);
        }
    }
  }
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
