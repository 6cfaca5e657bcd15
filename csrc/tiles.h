// The inner products, for one instruction set: register-blocked kernels over panels, and dot products for few rows.
// Included after vec.h, in the same namespace.
//
// A "lane" is 32 bits along the summed dimension: one float, or a pair of bf16 that vdpbf16ps multiplies and adds.

namespace moeffn {
namespace MOEFFN_NS {

#if MOEFFN_WIDTH == 16
constexpr int kVectors = 4;  // columns of a panel, in vectors
constexpr int kRows = 6;     // rows of a register block: 24 accumulators, 4 columns, 6 broadcasts from memory
constexpr int kDotRows = 6;
#elif defined(__AVX2__)
constexpr int kVectors = 2;
constexpr int kRows = 6;
constexpr int kDotRows = 3;
#else
constexpr int kVectors = 2;
constexpr int kRows = 4;
constexpr int kDotRows = 2;
#endif
constexpr int kStreams = 4;            // weight rows read at once by the dot form
constexpr int kPanel = kVectors * W;   // columns of a panel
// Lanes summed before a panel's partial sums are stored: 16 to 32 KiB of panel, which stay in L1 for all rows of a block.
#if MOEFFN_WIDTH == 16
constexpr int64_t kLaneBlock = 128;
#else
constexpr int64_t kLaneBlock = 256;
#endif

// Bytes that the dot form asks for ahead in each stream. On processors with AMX 2 KiB bring decoding from 26 to 30 GB/s
// (10 to 18 % off T = 1 and 4); on Zen 4 any distance costs 3 to 15 %.
#ifndef MOEFFN_STREAM_AHEAD
#define MOEFFN_STREAM_AHEAD 0
#endif
constexpr int64_t kStreamAhead = MOEFFN_STREAM_AHEAD;

// Multiplies floats; weights of any dtype are widened when they are loaded.
struct FloatLane {
  using Elem = float;
  static constexpr int kPerLane = 1;
  template <class WT>
  MOEFFN_INLINE vf lanes(const WT* p) {
    return load(p);
  }
  template <class WT>
  MOEFFN_INLINE vf lanes_part(const WT* p, int64_t elems) {
    return load_part(p, elems);
  }
  MOEFFN_INLINE vf mac(vf a, vf b, vf c) { return fma(a, b, c); }
};

#ifdef __AVX512BF16__
struct PairLane {
  using Elem = bf16;
  static constexpr int kPerLane = 2;
  MOEFFN_INLINE vf lanes(const bf16* p) { return load(reinterpret_cast<const float*>(p)); }
  MOEFFN_INLINE vf lanes_part(const bf16* p, int64_t elems) {
    bf16 tmp[2 * W];
    memset(tmp, 0, sizeof tmp);
    memcpy(tmp, p, static_cast<size_t>(elems) * 2);
    return lanes(tmp);
  }
  MOEFFN_INLINE vf mac(vf a, vf b, vf c) {
    __m512bh x, y;
    memcpy(&x, &a, sizeof x);
    memcpy(&y, &b, sizeof y);
    return (vf)_mm512_dpbf16_ps((__m512)c, x, y);
  }
};
#endif

template <class L>
MOEFFN_INLINE int64_t lanes_of(int64_t elems) {
  return (elems + L::kPerLane - 1) / L::kPerLane;
}
// Lanes from one row of a tile to the next: one vector more than needed, so that the rows of a power-of-two width do not
// all fall into one set of the cache. What is past the row is zero.
template <class L>
MOEFFN_INLINE int64_t row_lanes(int64_t elems) {
  return round_to(lanes_of<L>(elems), W) + W;
}

// The lanes of two vectors, one of each in turn: the first or the second half of each.
MOEFFN_INLINE vf interleave(vf a, vf b, int half) {
#if defined(__clang__)
  vf r;
  for (int i = 0; i < W; ++i) r[i] = (i % 2 ? b : a)[half * (W / 2) + i / 2];
  return r;
#else
  vi lanes;
  for (int i = 0; i < W; ++i) lanes[i] = half * (W / 2) + i / 2 + (i % 2) * W;
  return __builtin_shuffle(a, b, lanes);
#endif
}

// In place: the W x W transpose of 32-bit lanes, by log2(W) rounds of interleaving.
MOEFFN_INLINE void transpose(vf (&r)[W]) {
#if MOEFFN_WIDTH > 1
#pragma GCC unroll 4
  for (int step = 1; step < W; step *= 2) {
    vf t[W];
#pragma GCC unroll 16
    for (int i = 0; i < W / 2; ++i) {
      t[2 * i] = interleave(r[i], r[i + W / 2], 0);
      t[2 * i + 1] = interleave(r[i], r[i + W / 2], 1);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) r[i] = t[i];
  }
#endif
}

// panel[lane][v * W + c] = row (v * W + c) of the weights, elements [k0, k1); rows are nullptr where there is none.
template <class L, class WT>
static void pack_panel(const WT* const* rows, int vectors, int64_t k0, int64_t k1, float* panel) {
  const int64_t width = static_cast<int64_t>(vectors) * W;
  for (int v = 0; v < vectors; ++v) {
    const WT* const* r = rows + v * W;
    for (int64_t k = k0; k < k1; k += W * L::kPerLane) {
      const int64_t elems = least(k1 - k, W * L::kPerLane);
      vf block[W];
      if (elems == W * L::kPerLane) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) block[i] = r[i] ? L::lanes(r[i] + k) : splat(0.0f);
      } else {
        for (int i = 0; i < W; ++i) block[i] = r[i] ? L::lanes_part(r[i] + k, elems) : splat(0.0f);
      }
      transpose(block);
      float* to = panel + (k - k0) / L::kPerLane * width + v * W;
      const int64_t n = lanes_of<L>(elems);
      for (int64_t i = 0; i < n; ++i) store(to + i * width, block[i]);
    }
  }
}

// The weights that are packed next: lines of `rows` rows, asked for while the present panel multiplies, so that packing
// finds them in L2.
struct Coming {
  const char* const* row = nullptr;
  int64_t shift = 0;  // bytes from a row's start to what is packed next
  int log_lines = 0;  // of a row
  int64_t left = 0;   // lines not asked for
  int64_t mask = 0;   // one line at every (mask + 1)th step
  int64_t at = 0;
};

MOEFFN_INLINE void ask_next(Coming& c) {
  const char* p = c.row[c.at >> c.log_lines] + c.shift + (c.at & ((1 << c.log_lines) - 1)) * 64;
  __builtin_prefetch(p, 0, 2);
  ++c.at;
  --c.left;
}

// c[m][0..V*W) (+)= tile row m · panel, over `lanes` lanes.
template <class L, int M, int V>
static void block_kernel(const float* tile, int64_t stride, const float* panel, int64_t lanes, float* c, int64_t c_stride,
                         bool first, Coming& pending) {
  Coming coming = pending;  // in registers
  vf acc[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[m][v] = first ? splat(0.0f) : load(c + m * c_stride + v * W);
  for (int64_t k = 0; k < lanes; ++k) {
    vf b[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) b[v] = load(panel + k * (V * W) + v * W);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const vf a = splat(tile[m * stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[m][v] = L::mac(a, b[v], acc[m][v]);
    }
    if (coming.left > 0 && (k & coming.mask) == 0) ask_next(coming);
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(c + m * c_stride + v * W, acc[m][v]);
  pending = coming;
}

template <class L, int V, int M = kRows>
static void block_rows(int64_t rows, const float* tile, int64_t stride, const float* panel, int64_t lanes, float* c,
                       int64_t c_stride, bool first, Coming& coming) {
  if constexpr (M > 1) {
    if (rows < M) return block_rows<L, V, M - 1>(rows, tile, stride, panel, lanes, c, c_stride, first, coming);
  }
  block_kernel<L, M, V>(tile, stride, panel, lanes, c, c_stride, first, coming);
}

// c (rows, V*W) (+)= tile · panel, in balanced blocks of at most kRows rows.
template <class L, int V>
static void panel_product(int64_t rows, const float* tile, int64_t stride, const float* panel, int64_t lanes, float* c,
                          int64_t c_stride, bool first, Coming coming) {
  const int64_t blocks = (rows + kRows - 1) / kRows;
  coming.mask = blocks * lanes >= 4 * coming.left ? 3 : blocks * lanes >= 2 * coming.left ? 1 : 0;
  int64_t m = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t n = (rows - m + (blocks - b) - 1) / (blocks - b);
    block_rows<L, V>(n, tile + m * stride, stride, panel, lanes, c + m * c_stride, c_stride, first, coming);
    m += n;
  }
}

// out[m][s] = tile row m · weight row s, for kStreams weight rows walked side by side.
template <class L, class WT, int M>
static void dot_kernel(const float* tile, int64_t stride, const WT* const* rows, int64_t elems, float* out) {
  vf acc[M][kStreams];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int s = 0; s < kStreams; ++s) acc[m][s] = splat(0.0f);
  const WT *r0 = rows[0], *r1 = rows[1], *r2 = rows[2], *r3 = rows[3];
  const int64_t step = W * L::kPerLane, full = elems / step * step;
  const float* x = tile;
  for (int64_t k = 0; k < full; k += step, x += W) {
    const vf w[kStreams] = {L::lanes(r0 + k), L::lanes(r1 + k), L::lanes(r2 + k), L::lanes(r3 + k)};
    if constexpr (kStreamAhead > 0)
      for (const WT* r : {r0, r1, r2, r3}) __builtin_prefetch(reinterpret_cast<const char*>(r + k) + kStreamAhead);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const vf a = load(x + m * stride);
#pragma GCC unroll 4
      for (int s = 0; s < kStreams; ++s) acc[m][s] = L::mac(a, w[s], acc[m][s]);
    }
  }
  if (full < elems) {
    const int64_t n = elems - full;
    const vf w[kStreams] = {L::lanes_part(r0 + full, n), L::lanes_part(r1 + full, n), L::lanes_part(r2 + full, n),
                            L::lanes_part(r3 + full, n)};
    for (int m = 0; m < M; ++m) {
      const vf a = load(x + m * stride);
      for (int s = 0; s < kStreams; ++s) acc[m][s] = L::mac(a, w[s], acc[m][s]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int s = 0; s < kStreams; ++s) out[m * kStreams + s] = sum(acc[m][s]);
}

template <class L, class WT, int M = kDotRows>
static void dot_some(int64_t rows, const float* tile, int64_t stride, const WT* const* weights, int64_t elems, float* out) {
  if constexpr (M > 1) {
    if (rows < M) return dot_some<L, WT, M - 1>(rows, tile, stride, weights, elems, out);
  }
  dot_kernel<L, WT, M>(tile, stride, weights, elems, out);
}

// out (rows, kStreams) = tile · the kStreams weight rows. The second pass over the rows finds the weights in L1.
template <class L, class WT>
static void dot_rows(int64_t rows, const float* tile, int64_t stride, const WT* const* weights, int64_t elems, float* out) {
  for (int64_t m = 0; m < rows; m += kDotRows)
    dot_some<L, WT>(least(kDotRows, rows - m), tile + m * stride, stride, weights, elems, out + m * kStreams);
}

// Weight rows whose elements do not lie side by side are copied first: to (n, k) contiguous.
template <class WT>
static void copy_rows(const WT* from, int64_t row_stride, int64_t k_stride, int64_t n, int64_t k, WT* to) {
  for (int64_t j0 = 0; j0 < k; j0 += 64)
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = j0; j < least(k, j0 + 64); ++j) to[i * k + j] = from[i * row_stride + j * k_stride];
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
