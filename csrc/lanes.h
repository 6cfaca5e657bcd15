// Lanes: what a vector element of the kernels holds, and turning rows of them into columns. Included after vec.h, in the
// same namespace.
//
// A "lane" is 32 bits along the summed dimension: one float, or a pair of bf16 that vdpbf16ps multiplies and adds.

namespace moeffn {
namespace MOEFFN_NS {

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
  // One lane of W tokens, from their next kPerLane elements.
  MOEFFN_INLINE vf join(const vf* elems) { return elems[0]; }
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
  MOEFFN_INLINE vf join(const vf* elems) {
    const __m512i lo = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)elems[0]));
    const __m512i hi = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)elems[1]));
    return (vf)_mm512_or_si512(lo, _mm512_slli_epi32(hi, 16));
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

// Rows of a transposed matrix asked for ahead of their copy.
constexpr int64_t kCopyAhead = 2 * W;

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

// to[lane * width + c] = that lane of row c, for W rows (nullptr: zeros) of `elems` elements.
template <class L>
static void pack_rows(const typename L::Elem* const* rows, int64_t elems, float* to, int64_t width) {
  for (int64_t k = 0; k < elems; k += W * L::kPerLane) {
    const int64_t left = elems - k;
    vf block[W];
    if (left >= W * L::kPerLane) {
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) block[i] = rows[i] ? L::lanes(rows[i] + k) : splat(0.0f);
    } else {
      for (int i = 0; i < W; ++i) block[i] = rows[i] ? L::lanes_part(rows[i] + k, left) : splat(0.0f);
    }
    transpose(block);
    const int64_t n = least(W, lanes_of<L>(left));
    for (int64_t i = 0; i < n; ++i) store(to + (k / L::kPerLane + i) * width, block[i]);
  }
}

// Stores what a vector of 32-bit words holds of W steps along the sum: one row of floats, or two neighbouring rows (`stride`
// apart) of 16-bit elements.
MOEFFN_INLINE void put_column(vf words, float* to, int64_t) { store(to, words); }
template <class E>
MOEFFN_INLINE void put_column(vf words, E* to, int64_t stride) {
  const vu w = as_bits(words);
#if MOEFFN_WIDTH == 16
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)w));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + stride), _mm512_cvtepi32_epi16((__m512i)(w >> 16)));
#else
  const vh low = __builtin_convertvector(w, vh), high = __builtin_convertvector(w >> 16, vh);
  memcpy(to, &low, sizeof low);
  memcpy(to + stride, &high, sizeof high);
#endif
}

// Weight rows whose elements do not lie side by side, copied to (n, k) contiguous.
template <class E>
static void copy_rows(const E* from, int64_t row_stride, int64_t k_stride, int64_t n, int64_t k, E* to) {
  constexpr int64_t kColumns = W * (4 / sizeof(E));  // of a vector of words
  int64_t whole_n = 0, whole_k = 0;
  if (row_stride == 1) {  // a transposed matrix: blocks are turned in registers, the lines of later ones asked for
    whole_n = n / kColumns * kColumns;
    whole_k = k / W * W;
    for (int64_t j = 0; j < whole_k; j += W)
      for (int64_t i = 0; i < whole_n; i += kColumns) {
        const E* at = from + i + j * k_stride;
        vf block[W];
#pragma GCC unroll 16
        for (int64_t s = 0; s < W; ++s) {
          memcpy(&block[s], at + s * k_stride, sizeof(vf));
          __builtin_prefetch(at + (kCopyAhead + s) * k_stride);
        }
        transpose(block);
#pragma GCC unroll 16
        for (int64_t s = 0; s < W; ++s) put_column(block[s], to + (i + s * (4 / sizeof(E))) * k + j, k);
      }
  }
  auto rest = [&](int64_t i0, int64_t j_first) {
    for (int64_t j0 = j_first; j0 < k; j0 += 64)
      for (int64_t i = i0; i < n; ++i)
        for (int64_t j = j0; j < least(k, j0 + 64); ++j) to[i * k + j] = from[i * row_stride + j * k_stride];
  };
  rest(whole_n, 0);
  n = whole_n;
  rest(0, whole_k);
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
