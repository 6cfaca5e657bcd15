// Products of bf16 matrices on AMX tiles. Included after ffn.h, in the same namespace.
//
// The product is taken transposed: C (16 weight rows x 16 tokens) += A (16 weight rows x 32) · B (32 x 16 tokens). So
// plain row-major weights are the A operand as they lie, and no packed copy of them exists; the few activations are
// packed to B: per group of 16 tokens, [k / 2][token][k % 2]. A tile of C holds, after the activation, two of its rows
// side by side in just that order, so the up projection writes the down projection's B without another shuffle.

namespace moeffn {
namespace MOEFFN_NS {

constexpr int64_t kGroup = 16;         // tokens in a tile
constexpr int64_t kStep = 32;          // elements of a tile along the sum
constexpr int64_t kTileDotLimit = 2;   // up to so many rows by the dot form, which multiplies too long from 3 on
constexpr int64_t kRun = 6;  // rows that a stream of stream_product reads one behind the other
constexpr int64_t kGroupBytes = kGroup * kStep * 2;
constexpr int64_t kTileShare = 3 << 18;  // bytes of packed activations that stay in L2 beside the weights
constexpr int64_t kSumsBytes = 1 << 18;

// Tokens in the tiles of a block with so many rows. B comes from L2 beside the weights from memory, and takes from them
// what a core has to fetch with: of 3 to 8 rows, tiles of 4 and 8 tokens read 2 to 6 % faster than those of 16.
MOEFFN_INLINE int64_t tile_tokens(int64_t rows) { return rows <= 4 ? 4 : rows <= 8 ? 8 : kGroup; }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  explicit TileConfig(int64_t tokens) {
    for (int tile : {0, 1, 2, 3, 6, 7}) row_bytes[tile] = static_cast<uint16_t>(tokens * 4);
  }
  // Not by gcc's intrinsics, which tell the compiler of the first 8 bytes only: it drops the stores to the others.
  MOEFFN_SMALL void load() const { __asm__ volatile("ldtilecfg %0" : : "m"(*this)); }
  MOEFFN_SMALL void store() { __asm__ volatile("sttilecfg %0" : "=m"(*this)); }
};

// The tile registers' configuration belongs to the thread, which oneDNN may have set: put back what was there.
class UseTiles {
 public:
  explicit UseTiles(int64_t tokens = kGroup) : before_(tokens) {
    const TileConfig config = before_;
    before_.store();
    config.load();
  }
  ~UseTiles() {
    if (before_.palette)
      before_.load();
    else
      _tile_release();
  }

 private:
  TileConfig before_;
};

// 16 weight rows: where they are, and the last, incomplete step of the sum padded with zeros.
struct Rows16 {
  const char* data;
  int64_t stride;    // bytes
  const char* tail;  // (16, 32), or nullptr when the sum is a multiple of 32
};

struct TileBuffers {
  char* x;        // (groups, round32(D) / 2, 16, 2)
  char* few;      // 2 x (16, round32(max(D, F))): tiles of fewer rows than 16
  bf16* copies;   // (kChunk, max(D, F)): rows of weights whose elements do not lie side by side
  char* tails;    // 2 x (16, 32)
  float* sums;    // (16, 16) tiles
  float* bias;    // 2 x 32
  float* row;     // as Buffers::row
  bf16* rows;     // (16, row_lanes(D)): rows of x before packing
};

MOEFFN_INLINE TileBuffers carve_tiles(char* data, int64_t rows, const Experts& w, size_t* used) {
  const int64_t D = w.D, widest = D > w.F ? D : w.F;
  int64_t at = 0;
  auto take = [&](int64_t bytes) {
    char* p = data ? data + at : nullptr;
    at += round_to(bytes, 64);
    return p;
  };
  TileBuffers b;
  b.x = take(round_to(rows, kGroup) * round_to(D, kStep) * 2);
  b.few = take(2 * kGroup * round_to(widest, kStep) * 2);
  b.copies = reinterpret_cast<bf16*>(take(contiguous_rows(w) ? 0 : kChunk * widest * 2));
  b.tails = take(2 * kGroupBytes);
  b.sums = reinterpret_cast<float*>(take(kSumsBytes + round_to(rows, 2 * kGroup) * 128));
  b.bias = reinterpret_cast<float*>(take(64 * 4));
  b.row = reinterpret_cast<float*>(take(round_to(D, W) * 4));
  b.rows = reinterpret_cast<bf16*>(take(kGroup * row_lanes<PairLane>(D) * 4));
  if (used) *used = static_cast<size_t>(at);
  return b;
}

// `count` rows of a strip from `first` as tile `index`; rows past `count` are zero.
static Rows16 rows16(const Strip& strip, int64_t first, int64_t count, int64_t elems, int index, const TileBuffers& buf) {
  const char* from = strip.data + first * strip.stride;
  const int64_t full = elems / kStep * kStep, padded = round_to(elems, kStep);
  if (count < kGroup) {
    char* to = buf.few + index * kGroup * padded * 2;
    memset(to, 0, static_cast<size_t>(kGroup * padded) * 2);
    for (int64_t i = 0; i < count; ++i) memcpy(to + i * padded * 2, from + i * strip.stride, static_cast<size_t>(elems) * 2);
    return {to, padded * 2, to + full * 2};
  }
  Rows16 r{from, strip.stride, nullptr};
  if (full < elems) {
    char* tail = buf.tails + index * kGroupBytes;
    memset(tail, 0, static_cast<size_t>(kGroupBytes));
    for (int64_t i = 0; i < kGroup; ++i)
      memcpy(tail + i * kStep * 2, from + i * strip.stride + full * 2, static_cast<size_t>(elems - full) * 2);
    r.tail = tail;
  }
  return r;
}

MOEFFN_INLINE int64_t tail_stride(const Rows16& r, int64_t elems) {
  return r.tail == r.data + elems / kStep * kStep * 2 ? r.stride : kStep * 2;
}

// Asks L2 for rows of the weights that come next, while the tiles multiply: rows [from, from + rows) of the 32 that lie
// `distance` bytes behind the present ones.
struct Ahead {
  int64_t distance = 0;
  int from = 0, rows = 0;
};

MOEFFN_INLINE void ask(const Rows16* a, const Ahead& ahead, int64_t k) {
  for (int r = ahead.from; r < ahead.from + ahead.rows; ++r) {
    const Rows16& half = a[r / kGroup];
    _mm_prefetch(half.data + (r % kGroup) * half.stride + ahead.distance + k * 64, _MM_HINT_T1);
  }
}

// Asks for the first lines of the next tiles' rows, one row of each in each of the last 16 of `steps` steps. Prefetchers stop
// at the end of a page, and many rows get to theirs together. With 17 to 64 tokens this is worth 2 to 6 %.
MOEFFN_INLINE void ask_heads(const Rows16* next, int64_t count, int64_t k, int64_t steps) {
  const int64_t row = k - steps + kGroup;
  if (!next || row < 0) return;
  for (int64_t i = 0; i < count; ++i) {
    const char* head = next[i].data + row * next[i].stride;
    _mm_prefetch(head, _MM_HINT_T1);
    _mm_prefetch(head + 64, _MM_HINT_T1);
  }
}

// Four tiles of sums (two without a second group of tokens) from memory, or zero, and back.
template <bool kTwo>
MOEFFN_INLINE void begin_sums(const float* sums, bool zero) {
  if (zero) {
    _tile_zero(0);
    _tile_zero(2);
    if (kTwo) {
      _tile_zero(1);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(2, sums + 512, 64);
    if (kTwo) {
      _tile_loadd(1, sums + 256, 64);
      _tile_loadd(3, sums + 768, 64);
    }
  }
}
template <bool kTwo>
MOEFFN_INLINE void end_sums(float* sums) {
  _tile_stored(0, sums, 64);
  _tile_stored(2, sums + 512, 64);
  if (kTwo) {
    _tile_stored(1, sums + 256, 64);
    _tile_stored(3, sums + 768, 64);
  }
}

// Tile 2 i + j of sums += A_i · B_j over steps [k0, k1), for two groups of 16 rows and one or two groups of 16 tokens. More
// rows at once (four tiles) read memory more slowly: 64 streams are more than the prefetchers follow, 23 against 26 GB/s.
template <bool kTwo>
MOEFFN_INLINE void tiles_2x(const Rows16* a, const char* b0, const char* b1, int64_t tokens, int64_t elems, int64_t k0,
                            int64_t k1, const Ahead& ahead, const Rows16* next = nullptr) {
  const int64_t pitch = tokens * 4, step = tokens * 64;  // bytes of B
  const int64_t full = least(k1, elems / kStep);
  const char *p0 = a[0].data, *p1 = a[1].data;
  const int64_t s0 = a[0].stride, s1 = a[1].stride;
  for (int64_t k = k0; k < full; ++k) {
    _tile_loadd(4, p0 + k * 64, s0);
    _tile_loadd(6, b0 + k * step, pitch);
    _tile_dpbf16ps(0, 4, 6);
    if (kTwo) {
      _tile_loadd(7, b1 + k * step, pitch);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_loadd(5, p1 + k * 64, s1);
    _tile_dpbf16ps(2, 5, 6);
    if (kTwo) _tile_dpbf16ps(3, 5, 7);
    if (ahead.rows) ask(a, ahead, k);
    if (kTwo) ask_heads(next, 2, k, elems / kStep);
  }
  if (full < k1) {
    _tile_loadd(4, a[0].tail, tail_stride(a[0], elems));
    _tile_loadd(5, a[1].tail, tail_stride(a[1], elems));
    _tile_loadd(6, b0 + full * step, pitch);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if (kTwo) {
      _tile_loadd(7, b1 + full * step, pitch);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// Products of `panels` panels of 32 weight rows with all groups of tokens. get(p, a) gives panel p's rows, which start
// `advance` rows behind those of p - 1. finish(p, g, i, sums) is called for i = 0 .. pieces - 1 with the tiles of groups g and
// g + 1, a few steps apart while the next tiles multiply: at once it takes up to a third of the time.
template <class Get, class Finish>
static void tile_product(int64_t panels, int64_t groups, int64_t elems, const char* b, int64_t advance, float* sums,
                         int64_t pieces, const Get& get, const Finish& finish) {
  const int64_t steps = round_to(elems, kStep) / kStep, group = steps * kGroupBytes, pairs = (groups + 1) / 2;
  // The part of B in use stays in L2, at the price of sums that are stored and loaded again.
  const int64_t blocks = (groups * group + kTileShare - 1) / kTileShare;
  const int64_t per_block = (steps + blocks - 1) / blocks;
  const int64_t together = blocks == 1 ? 1 : kSumsBytes / (pairs * 4096) > 1 ? kSumsBytes / (pairs * 4096) : 1;
  struct {
    int64_t p, g, i;
    float* sums;
  } left{0, 0, pieces, nullptr};  // what is to be finished
  auto finish_some = [&] {
    if (left.i < pieces) finish(left.p, left.g, left.i++, left.sums);
  };
  // Tile 2 i + j of sums (i, j, 16, 16) += A_i · B_j over steps [k0, k1).
  auto add_tiles = [&](const Rows16* a, const char* b0, int64_t k0, int64_t k1, float* to, const Ahead& ahead, auto two) {
    constexpr bool kTwo = decltype(two)::value;
    begin_sums<kTwo>(to, k0 == 0);
    for (int64_t i = 0, n = k1 - k0; i < pieces; ++i) {
      tiles_2x<kTwo>(a, b0, b0 + group, kGroup, elems, k0 + n * i / pieces, k0 + n * (i + 1) / pieces, ahead);
      finish_some();
    }
    end_sums<kTwo>(to);
  };
  int64_t made = 0;
  for (int64_t first = 0; first < panels; first += together)
    for (int64_t k0 = 0; k0 < steps; k0 += per_block) {
      const int64_t k1 = least(steps, k0 + per_block);
      for (int64_t p = first; p < least(panels, first + together); ++p) {
        Rows16 a[2];
        get(p, a);
        for (int64_t j = 0; j < pairs; ++j) {
          Ahead ahead;
          if (pairs > 1 && p + 1 < panels) {
            ahead.distance = advance * a[0].stride;
            ahead.from = static_cast<int>(32 * j / pairs);
            ahead.rows = static_cast<int>(32 * (j + 1) / pairs) - ahead.from;
          }
          float* s = sums + (blocks > 1 ? (p - first) * pairs + j : made++ % 2) * 1024;
          if (2 * j + 1 < groups)
            add_tiles(a, b + 2 * j * group, k0, k1, s, ahead, std::true_type());
          else
            add_tiles(a, b + 2 * j * group, k0, k1, s, ahead, std::false_type());
          if (k1 == steps) left = {p, 2 * j, 0, s};
        }
      }
    }
  while (left.i < pieces) finish_some();
}

// Tile j of sums += A · B_j over steps [k0, k1), for 16 rows and three or four groups of 16 tokens: each row is read once.
template <bool kFour>
MOEFFN_INLINE void tiles_1x(const Rows16& a, const char* b, int64_t elems, int64_t k0, int64_t k1, const Rows16* next) {
  const int64_t whole = elems / kStep, group = round_to(elems, kStep) * kGroup * 2;
  for (int64_t k = k0; k < k1; ++k) {
    const char* at = b + k * kGroupBytes;
    if (k < whole)
      _tile_loadd(4, a.data + k * 64, a.stride);
    else
      _tile_loadd(4, a.tail, tail_stride(a, elems));
    _tile_loadd(5, at, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, at + group, 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, at + 2 * group, 64);
    _tile_dpbf16ps(2, 4, 7);
    if (kFour) {
      _tile_loadd(5, at + 3 * group, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    ask_heads(next, 1, k, whole);
  }
}

// Most groups of stream_product: with five and six, whose sums tiles could hold, it is no faster than tile_product.
constexpr int64_t kStreamGroups = 4;

// Rows in stream_product's ring of sums, two panels: (groups, strips, kRing / strips, tokens).
constexpr int64_t kRing = 2 * kRun * 2 * kGroup;
static_assert(kStreamGroups * kRing * kGroup * 4 <= kSumsBytes, "");

// Whether stream_product takes so many groups.
MOEFFN_INLINE bool streams(int64_t groups, int64_t elems) {
  return groups <= kStreamGroups && groups * round_to(elems, kStep) / kStep * kGroupBytes <= kTileShare;
}

// Products of one or two strips of n weight rows with up to four groups of tokens, which take little longer than the weights
// take to come. Prefetchers follow one stream in a page of 4 KiB: of tiles with neighbouring rows, which are two to a page
// when rows have 2 KiB, they lose track (30 GB/s beside a plain read's 38). So a tile's rows lie kRun apart, and the next
// tiles take the rows between: 32 streams, each without a gap (35 to 37 GB/s; runs of 12 are slower with two groups, and
// software's requests, to L1 or L2, at any distance). The sums are stored in the order of the rows. finish(r, m, g, sums)
// takes rows [r, r + m) of the strips, `grain` at most, for group g. It is called a few steps apart while the tiles of the
// next panel multiply: nothing is read in the meantime, but for what is on its way already (1 to 2 %).
template <bool kMany, class Finish>
static void stream_product(const Strip* strips, int64_t count, int64_t n, int64_t groups, int64_t tokens, int64_t elems,
                           const char* b, int64_t grain, const TileBuffers& buf, const Finish& finish) {
  const int64_t steps = round_to(elems, kStep) / kStep, width = 2 * kGroup / count, ring = kRing / count;
  const int64_t pieces = width / grain * groups;
  int64_t ready = 0, done = 0, g = 0;
  auto finish_some = [&] {
    const int64_t m = least(grain, ready - done);
    finish(done, m, g, buf.sums + (g * kRing + done % ring) * tokens);
    if (++g == groups) {
      g = 0;
      done += m;
    }
  };
  auto multiply = [&](const Rows16* a, const Rows16* next, float* c0, float* c1, int64_t stride, auto two) {
    constexpr bool kTwo = decltype(two)::value;
    begin_sums<kTwo>(nullptr, true);
    for (int64_t i = 0; i < pieces; ++i) {
      tiles_2x<kTwo>(a, b, b + steps * kGroupBytes, tokens, elems, steps * i / pieces, steps * (i + 1) / pieces, {}, next);
      if (done < ready) finish_some();
    }
    _tile_stored(0, c0, stride);
    _tile_stored(2, c1, stride);
    if (kTwo) {
      _tile_stored(1, c0 + kRing * kGroup, stride);
      _tile_stored(3, c1 + kRing * kGroup, stride);
    }
  };
  auto multiply_many = [&](const Rows16& a, const Rows16* next, float* c, int64_t stride, auto four) {
    constexpr bool kFour = decltype(four)::value;
    const int64_t some = (pieces + 1) / 2;
    begin_sums<true>(nullptr, true);
    for (int64_t i = 0; i < some; ++i) {
      tiles_1x<kFour>(a, b, elems, steps * i / some, steps * (i + 1) / some, next);
      if (done < ready) finish_some();
    }
    _tile_stored(0, c, stride);
    _tile_stored(1, c + kRing * kGroup, stride);
    _tile_stored(2, c + 2 * kRing * kGroup, stride);
    if (kFour) _tile_stored(3, c + 3 * kRing * kGroup, stride);
  };
  for (int64_t q; ready < n; ready = least(n, ready + q * width)) {
    q = least(kRun, (n - ready) / width);
    if (q == 0) q = 1;
    for (int64_t j = 0; j < q; ++j) {
      Rows16 a[2], following[2];
      float* c[2];
      for (int i = 0; i < 2; ++i) {
        const Strip& strip = strips[count == 2 ? i : 0];
        const int64_t skip = count == 2 ? 0 : i * q * kGroup, left = least(kGroup, n - ready - skip);
        const int64_t first = left > 0 ? ready + skip + j : 0;
        a[i] = rows16({strip.data + first * strip.stride, q * strip.stride}, 0, left > 0 ? left : 0, elems, i, buf);
        following[i] = {strip.data + (first + 1) * strip.stride, q * strip.stride, nullptr};
        c[i] = buf.sums + ((count == 2 ? i * ring : 0) + ready % ring + skip + j) * tokens;
      }
      const Rows16* next = j + 1 < q ? following : nullptr;
      if constexpr (kMany) {
        for (int i = 0; i < 2; ++i)
          if (groups > 3)
            multiply_many(a[i], i == 0 ? &a[1] : next, c[i], q * 64, std::true_type());
          else
            multiply_many(a[i], i == 0 ? &a[1] : next, c[i], q * 64, std::false_type());
      } else if (groups > 1) {
        multiply(a, next, c[0], c[1], q * tokens * 4, std::true_type());
      } else {
        multiply(a, next, c[0], c[1], q * tokens * 4, std::false_type());
      }
    }
  }
  while (done < n) finish_some();
}

// Transposes 4 x 4 lanes in each 128 bits of four vectors.
MOEFFN_INLINE void transpose4(__m512 (&r)[4]) {
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r[0], r[1])), b = _mm512_castps_pd(_mm512_unpackhi_ps(r[0], r[1]));
  const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(r[2], r[3])), d = _mm512_castps_pd(_mm512_unpackhi_ps(r[2], r[3]));
  r[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
  r[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
  r[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
  r[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
}

// Packs `tokens` rows (nullptr: zeros) of `elems` elements to B order, zeros up to a whole step.
static void pack_group(const bf16* const* rows, int64_t tokens, int64_t elems, char* to) {
  float* b = reinterpret_cast<float*>(to);
  for (int64_t k = 0; k < elems; k += kStep, b += kStep / 2 * tokens)
    for (int64_t m = 0; m < tokens; m += 4) {
      __m512 v[4];
      for (int i = 0; i < 4; ++i) {
        const bf16* row = rows[m + i];
        v[i] = (__m512)(!row ? splat(0.0f) : elems - k >= kStep ? PairLane::lanes(row + k) : PairLane::lanes_part(row + k, elems - k));
      }
      transpose4(v);
      for (int i = 0; i < 4; ++i) {
        float* lane = b + i * tokens + m;
        _mm_storeu_ps(lane, _mm512_castps512_ps128(v[i]));
        _mm_storeu_ps(lane + 4 * tokens, _mm512_extractf32x4_ps(v[i], 1));
        _mm_storeu_ps(lane + 8 * tokens, _mm512_extractf32x4_ps(v[i], 2));
        _mm_storeu_ps(lane + 12 * tokens, _mm512_extractf32x4_ps(v[i], 3));
      }
    }
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
