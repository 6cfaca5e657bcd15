// The backward's products on packed operands, for one instruction set. Included after backward_pack.h.
//
// A panel of A (kPanelRows rows) times a panel of B (32 columns) gives a tile of C in registers; it goes through an
// L1-resident array to the sink, which converts, scales or accumulates. With few rows in an expert K is short and the
// sink dominates: it writes whole cache lines past the caches where it can.

namespace moeffn {
namespace MOEFFN_NS {

struct alignas(64) Tile {
  float c[kPanelRows][32];
};

#ifdef MOEFFN_TILES
// Two by two register tiles of 16 x 16, or one by two. A block of K is 16 words for 16 cycles of the tile unit.
struct TileShape {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The tile registers are set up for the length of a product; the asm reads the whole struct (the intrinsic of older
// compilers says that it reads 8 bytes, and the rest may not have been stored yet).
struct TileScope {
  TileScope() {
    const TileShape shape;
    __asm__ volatile("ldtilecfg %0" : : "m"(shape));
  }
  ~TileScope() { _tile_release(); }
};

// c (rows, 32) = [c +] A B. Rows up to the next multiple of 16 are written.
template <class L>
static void tile_product(int64_t rows, const float* a, const float* b, int64_t words, bool add, float* c, int64_t ld) {
  const int64_t blocks = (words + 15) / 16, stride = ld * 4;
  float* low = c + 16 * ld;
  if (rows > 16) {
    if (add) {
      _tile_loadd(0, c, stride);
      _tile_loadd(1, c + 16, stride);
      _tile_loadd(2, low, stride);
      _tile_loadd(3, low + 16, stride);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t k = 0; k < blocks; ++k, a += 32 * 16, b += 16 * 32) {
      _tile_loadd(6, b, 128);
      _tile_loadd(4, a, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + 16, 128);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + 16 * 16, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, low, stride);
    _tile_stored(3, low + 16, stride);
  } else {
    if (add) {
      _tile_loadd(0, c, stride);
      _tile_loadd(1, c + 16, stride);
    } else {
      _tile_zero(0);
      _tile_zero(1);
    }
    for (int64_t k = 0; k < blocks; ++k, a += 32 * 16, b += 16 * 32) {
      _tile_loadd(6, b, 128);
      _tile_loadd(4, a, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + 16, 128);
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  _tile_stored(0, c, stride);
  _tile_stored(1, c + 16, stride);
}

#else

struct TileScope {
  TileScope() {}
};

constexpr int kGroup = 2;  // vectors of columns at a time
// Products of floats are summed over so many words at a time: the error of one long sum grows with its length, and
// libraries that cut theirs would be several times closer to the truth. Pairs of bf16 bring far larger errors.
constexpr int64_t kSumWords = 128;

template <class L, int M>
static void rows_product(const float* a, const float* b, int64_t words, bool add, float* c, int64_t ld) {
  for (int c0 = 0; c0 < 32; c0 += kGroup * W) {
    const float *ak = a, *bk = b + c0;
    bool sum = add;
    for (int64_t left = words; left > 0; sum = true) {
      vf acc[M][kGroup];
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < kGroup; ++v) acc[m][v] = splat(0.0f);
      const int64_t stop = L::kPer == 1 && left > kSumWords ? left - kSumWords : 0;
      for (; left > stop; left -= 16, ak += kPanelRows * 16) {
        const int64_t n = least(left, 16);
        for (int64_t k = 0; k < n; ++k, bk += 32) {
          vf w[kGroup];
#pragma GCC unroll 2
          for (int v = 0; v < kGroup; ++v) w[v] = load(bk + v * W);
#pragma GCC unroll 16
          for (int m = 0; m < M; ++m) {
            const vf x = splat(ak[m * 16 + k]);
#pragma GCC unroll 2
            for (int v = 0; v < kGroup; ++v) acc[m][v] = L::mac(x, w[v], acc[m][v]);
          }
        }
      }
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < kGroup; ++v) {
          float* to = c + m * ld + c0 + v * W;
          store(to, sum ? acc[m][v] + load(to) : acc[m][v]);
        }
    }
  }
}

template <class L, int M = kPanelRows>
static void tile_product(int64_t rows, const float* a, const float* b, int64_t words, bool add, float* c, int64_t ld) {
  if constexpr (M > 1) {
    if (rows < M) return tile_product<L, M - 1>(rows, a, b, words, add, c, ld);
  }
  rows_product<L, M>(a, b, words, add, c, ld);
}
#endif

// A panel of A stays in L1 while all panels of B pass by.
template <class L>
static void product(const float* a, int64_t a_words, int64_t m, const float* b, int64_t n, int64_t words, bool add,
                    float* out, int64_t ld) {
  const int64_t a_panel = kPanelRows * round_to(a_words, 16), b_panel = 32 * round_to(words, 16);
  const TileScope scope;
  for (int64_t i = 0; i < m; i += kPanelRows)
    for (int64_t j = 0; j < n; j += 32)
      tile_product<L>(least(kPanelRows, m - i), a + i / kPanelRows * a_panel, b + j / 32 * b_panel, words, add,
                      out + i * ld + j, ld);
}

// 32 values as one or two whole cache lines that do not pass through the caches: a gradient is not read again soon, and
// memory is then written without having been read.
MOEFFN_INLINE bool streamable(const void* p, int64_t ld_bytes) {
  return W == 16 && ((reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(ld_bytes)) & 63) == 0;
}
#if MOEFFN_WIDTH == 16
MOEFFN_INLINE void stream32(float* to, const vf* v) {
  _mm512_stream_ps(to, (__m512)v[0]);
  _mm512_stream_ps(to + 16, (__m512)v[1]);
}
template <class E>
MOEFFN_INLINE void stream32(E* to, const vf* v) {
  alignas(64) E line[32];
  store(line, v[0]);
  store(line + 16, v[1]);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), *reinterpret_cast<const __m512i*>(line));
}
#ifdef __AVX512BF16__
MOEFFN_INLINE void stream32(bf16* to, const vf* v) {
  const __m512bh line = _mm512_cvtne2ps_pbh((__m512)v[1], (__m512)v[0]);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)line);
}
#endif
#else
template <class E>
MOEFFN_INLINE void stream32(E*, const vf*) {}
#endif
MOEFFN_INLINE void stream_fence() {
#if MOEFFN_WIDTH == 16
  _mm_sfence();
#endif
}

template <class L, class O>
static void product_grad_of(const float* a, int64_t m, const float* b, int64_t n, int64_t words, const GradSink& to) {
  const bool plain = !to.partial && !to.add && streamable(to.out, to.ld * static_cast<int64_t>(sizeof(O)));
  const int64_t partial_ld = round_to(n, 32);
  const int64_t padded = round_to(words, 16), a_panel = kPanelRows * padded, b_panel = 32 * padded;
  const TileScope scope;
  Tile tile;
  auto put = [&](int64_t i, int64_t rows, int64_t j, int64_t columns) {
    O* out = reinterpret_cast<O*>(to.out) + i * to.ld + j;
    if (plain && columns == 32) {
      for (int64_t r = 0; r < rows; ++r, out += to.ld) stream32(out, reinterpret_cast<const vf*>(tile.c[r]));
      return;
    }
    for (int64_t r = 0; r < rows; ++r, out += to.ld) {
      float* partial = to.partial ? to.partial + (i + r) * partial_ld + j : nullptr;
      for (int64_t k = 0; k < columns; k += W) {
        vf v = load(tile.c[r] + k);
        if (to.load_partial) v += load(partial + k);
        if (to.keep_partial) {
          store(partial + k, v);
        } else {
          if (to.add) v += load_upto(out + k, columns - k);
          store_upto(out + k, v, columns - k);
        }
      }
    }
  };
  for (int64_t i = 0; i < m; i += kPanelRows) {
    const int64_t rows = least(kPanelRows, m - i);
    for (int64_t j = 0; j < n; j += 32) {
      tile_product<L>(rows, a + i / kPanelRows * a_panel, b + j / 32 * b_panel, words, false, tile.c[0], 32);
      put(i, rows, j, least(32, n - j));
    }
  }
  if (plain) stream_fence();
}

template <class L>
static void product_grad(const float* a, int64_t m, const float* b, int64_t n, int64_t words, const GradSink& to) {
  with_type(to.out, to.dtype, [&](auto* o) {
    product_grad_of<L, std::remove_const_t<std::remove_pointer_t<decltype(o)>>>(a, m, b, n, words, to);
  });
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
