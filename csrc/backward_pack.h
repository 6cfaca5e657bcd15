// Packing for the backward's products, for one instruction set. Included after vec.h and lanes.h, in their namespace.

namespace moeffn {
namespace MOEFFN_NS {

constexpr int kParts = 16 / W;  // vectors in 16 words
constexpr int kPanelRows = MOEFFN_PANEL_ROWS;

struct Words {
  vf v[kParts];
};

// How words are made: from one row of floats, or from two rows (or neighbours) of bf16.
struct FloatWords : FloatLane {
  static constexpr int kPer = 1;

  // Words 0..15 along one row; n elements exist, zeros after.
  template <class E>
  MOEFFN_INLINE Words along(const E* p, int64_t n) {
    Words w;
    for (int i = 0; i < kParts; ++i, n -= W) w.v[i] = n >= W ? load(p + i * W) : n > 0 ? load_part(p + i * W, n) : vf{};
    return w;
  }
  // One word of each of 16 columns.
  template <class E>
  MOEFFN_INLINE Words across(const char* const* rows, int64_t left, int64_t column, int64_t n) {
    return left > 0 ? along(reinterpret_cast<const E*>(rows[0]) + column, n) : Words{};
  }
};

#ifdef __AVX512BF16__
MOEFFN_INLINE __m512i pair_low_high(__m256i low, __m256i high) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

struct PairWords : PairLane {
  static constexpr int kPer = 2;

  MOEFFN_INLINE __m256i sixteen(const bf16* p, int64_t n) {
    return n >= 16 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                   : _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p);
  }
  MOEFFN_INLINE __m256i sixteen(const float* p, int64_t n) {
    const __m512 v = n >= 16 ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
    return (__m256i)_mm512_cvtneps_pbh(v);
  }
  template <class E>
  MOEFFN_INLINE Words along(const E* p, int64_t n) {
    const __m256i a = n > 0 ? sixteen(p, n) : _mm256_setzero_si256();
    const __m256i b = n > 16 ? sixteen(p + 16, n - 16) : _mm256_setzero_si256();
    return Words{{(vf)_mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1))}};
  }
  template <class E>
  MOEFFN_INLINE Words across(const char* const* rows, int64_t left, int64_t column, int64_t n) {
    if (left <= 0) return Words{};
    const __m256i low = sixteen(reinterpret_cast<const E*>(rows[0]) + column, n);
    const __m256i high = left > 1 ? sixteen(reinterpret_cast<const E*>(rows[1]) + column, n) : _mm256_setzero_si256();
    return Words{{(vf)_mm512_castsi512_ps(pair_low_high(low, high))}};
  }
};
#endif

MOEFFN_INLINE void put_words(float* to, const Words& w) {
  for (int i = 0; i < kParts; ++i) store(to + i * W, w.v[i]);
}

// In place: the transpose of 16 x 16 words.
MOEFFN_INLINE void turn(Words (&w)[16]) {
  for (int i = 0; i < kParts; ++i)
    for (int j = i; j < kParts; ++j) {
      vf a[W], b[W];
#pragma GCC unroll 16
      for (int r = 0; r < W; ++r) {
        a[r] = w[i * W + r].v[j];
        b[r] = w[j * W + r].v[i];
      }
      transpose(a);
      if (i != j) transpose(b);
#pragma GCC unroll 16
      for (int r = 0; r < W; ++r) {
        w[j * W + r].v[i] = a[r];
        if (i != j) w[i * W + r].v[j] = b[r];
      }
    }
}

template <class L>
MOEFFN_INLINE int64_t word_blocks(int64_t k) {
  return (k + 16 * L::kPer - 1) / (16 * L::kPer);
}

// Rows past the last one: zeros, so that kernels that work on whole panels may read them.
template <class L, class E>
static void pack_a(const RowsOf& from, int64_t k, float* out) {
  const int64_t blocks = word_blocks<L>(k);
  for (int64_t i = 0; i < round_to(from.n, kPanelRows); ++i) {
    float* to = out + (i / kPanelRows * blocks * kPanelRows + i % kPanelRows) * 16;
    const E* row = i < from.n ? reinterpret_cast<const E*>(from.rows[i]) : nullptr;
    for (int64_t b = 0; b < blocks; ++b)
      put_words(to + b * kPanelRows * 16, row ? L::along(row + b * 16 * L::kPer, k - b * 16 * L::kPer) : Words{});
  }
}

template <class L, class E>
static void pack_a_turned(const RowsOf& from, int64_t m, float* out) {
  const int64_t blocks = word_blocks<L>(from.n), rows = round_to(m, kPanelRows);
  for (int64_t c = 0; c < rows; c += 16)
    for (int64_t b = 0; b < blocks; ++b) {
      Words w[16];
#pragma GCC unroll 16
      for (int64_t j = 0; j < 16; ++j) {
        const int64_t r = (b * 16 + j) * L::kPer;
        w[j] = c < m ? L::template across<E>(from.rows + r, from.n - r, c, m - c) : Words{};
      }
      turn(w);
      for (int64_t j = 0; j < least(16, rows - c); ++j) {
        const int64_t panel = (c + j) / kPanelRows, row = (c + j) % kPanelRows;
        put_words(out + ((panel * blocks + b) * kPanelRows + row) * 16, w[j]);
      }
    }
}

// Rows of plain weights come from memory: fetch ahead, as their pieces are too short for the hardware to guess.
constexpr int64_t kAhead = 12;

template <class L, class E>
static void pack_b(const RowsOf& from, int64_t n, float* out) {
  const int64_t blocks = word_blocks<L>(from.n), panel = blocks * 16 * 32;
  for (int64_t j = 0; j < blocks * 16; ++j) {
    const int64_t r = j * L::kPer;
    float* to = out + j * 32;
    if (r + kAhead + 1 < from.n) {
      const char *p = from.rows[r + kAhead], *q = from.rows[r + kAhead + 1];
      for (int64_t at = 0; at < n * static_cast<int64_t>(sizeof(E)); at += 64) {
        __builtin_prefetch(p + at);
        if (L::kPer == 2) __builtin_prefetch(q + at);
      }
    }
    for (int64_t c = 0; c < n; c += 32, to += panel) {
      put_words(to, L::template across<E>(from.rows + r, from.n - r, c, n - c));
      put_words(to + 16, n - c > 16 ? L::template across<E>(from.rows + r, from.n - r, c + 16, n - c - 16) : Words{});
    }
  }
}

template <class L, class E>
static void pack_b_turned(const RowsOf& from, int64_t k, float* out) {
  const int64_t blocks = word_blocks<L>(k);
  for (int64_t c = 0; c < round_to(from.n, 32); c += 16) {
    float* to = out + c / 32 * blocks * 16 * 32 + c % 32;
    for (int64_t b = 0; b < blocks; ++b) {
      Words w[16];
#pragma GCC unroll 16
      for (int64_t j = 0; j < 16; ++j)
        w[j] = c + j < from.n ? L::along(reinterpret_cast<const E*>(from.rows[c + j]) + b * 16 * L::kPer,
                                         k - b * 16 * L::kPer)
                              : Words{};
      turn(w);
      for (int64_t j = 0; j < 16; ++j) put_words(to + (b * 16 + j) * 32, w[j]);
    }
  }
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
