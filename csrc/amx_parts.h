// Products of fp32 matrices on AMX tiles. Included after amx.h, in the same namespace.
//
// A float is the sum of three bf16, exactly: its upper 8 bits, the next 8 and the last. Of the nine products of two such
// sums six are added, small ones first; what the other three would add is at most 2^-24 of the product, below the rounding
// of a fused multiply-add. A tile adds the 32 terms of a step from zero before they meet the accumulator, so these sums are
// rounded less often than those of the vector kernels. Tiles flush what is below 2^-126 to zero; so tokens and weights whose
// largest element is not of ordinary size (NaN and infinity among them) are left to the vector kernels.

namespace moeffn {
namespace MOEFFN_NS {

constexpr int kParts = 3;
constexpr int64_t kSplitStep = kParts * kGroupBytes;  // bytes of 16 x 32 numbers: the tiles of their parts
constexpr int64_t kSplitShare = 3 << 18;   // bytes of split activations that stay in L2 beside the weights
constexpr int64_t kSplitSums = 2 << 20;    // bytes of sums that are kept while the activations change
constexpr int64_t kSplitSteps = 16;        // steps of weights that are split at a time; 8 are 2 to 6 % slower
constexpr int64_t kSplitAhead = 2;         // such pieces between asking for weights and splitting them
constexpr int64_t kPieceBytes = 2 * kSplitSteps * kSplitStep;

// Bits of the largest magnitude of a row: from 2^-40 on nothing that counts is flushed in a product with another such row,
// and below 2^60 a token overflows with weights of unusual size alone.
constexpr int32_t kLeast = (127 - 40) << 23, kMost = (127 + 60) << 23, kInfinity = 255 << 23;
MOEFFN_INLINE bool ordinary(int32_t most) { return most == 0 || (most >= kLeast && most < kMost); }

MOEFFN_INLINE vi magnitude(vf v) { return (vi)(as_bits(v) & 0x7fffffffu); }
MOEFFN_INLINE vi larger(vi a, vi b) { return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b); }

// The parts of two vectors to three tiles, as 16 pairs of bf16 each. The elements of a step are paired with their sixteenth
// neighbours, in the rows of weights and of tokens alike.
MOEFFN_INLINE void split(vf a, vf b, char* to) {
  const vu upper = vu{} + 0xffff0000u;
#pragma GCC unroll 3
  for (int q = 0; q < kParts; ++q) {
    const vu half = vu{} + (q + 1 < kParts ? 0x8000u : 0u);  // to the nearest; the last part is exact
    const vu x = as_bits(a) + half, y = as_bits(b) + half;
    _mm512_store_si512(to + q * kGroupBytes, (__m512i)((x >> 16) | (y & upper)));
    a -= as_float(x & upper);
    b -= as_float(y & upper);
  }
}

struct SplitBuffers {
  char* tokens;   // (pairs of groups, steps of a segment, 2): the parts of activations
  int32_t* most;  // (groups, 16): the largest magnitude of each token, as bits
  char* weights;  // 2 x (kSplitSteps, 2): the parts of a piece of 32 weight rows, and of the next one
  float* sums;    // (16, 16) tiles
  float* copies;  // (kChunk, max(D, F)): rows of weights whose elements do not lie side by side
  float* bias;    // 2 x 32
  float* row;     // as Buffers::row
  float* rows;    // (16, row_lanes(D)): rows of x before packing
  float* few;     // (kDotLimit, row_lanes(F)): activations of rows for the vector kernels
  char* local;    // their working memory
};

// How a sum of `elems` is cut, so that the activations in use fit their share: `segments` of `steps` steps.
struct Segments {
  int64_t steps, segments;
  Segments(int64_t groups, int64_t elems) {
    const int64_t all = round_to(elems, kStep) / kStep, n = (groups * all * kSplitStep + kSplitShare - 1) / kSplitShare;
    steps = (all + n - 1) / n;
    segments = (all + steps - 1) / steps;
  }
};

static SplitBuffers carve_split(char* data, int64_t rows, const Experts& w, size_t* used) {
  const int64_t widest = w.D > w.F ? w.D : w.F, groups = (rows + kGroup - 1) / kGroup;
  const Segments up(groups, w.D), down(groups, w.F);
  const int64_t steps = up.steps > down.steps ? up.steps : down.steps;
  int64_t at = 0;
  auto take = [&](int64_t bytes) {
    char* p = data ? data + at : nullptr;
    at += round_to(bytes, 64);
    return p;
  };
  SplitBuffers b;
  b.tokens = take(round_to(groups, 2) * steps * kSplitStep);
  b.most = reinterpret_cast<int32_t*>(take(groups * kGroup * 4));
  b.weights = take(2 * kPieceBytes);
  b.sums = reinterpret_cast<float*>(take(kSplitSums + groups * 4096));
  b.copies = reinterpret_cast<float*>(take(contiguous_rows(w) ? 0 : kChunk * widest * 4));
  b.bias = reinterpret_cast<float*>(take(64 * 4));
  b.row = reinterpret_cast<float*>(take(round_to(w.D, W) * 4));
  b.rows = reinterpret_cast<float*>(take(kGroup * row_lanes<FloatLane>(w.D) * 4));
  b.few = reinterpret_cast<float*>(take(kDotLimit * row_lanes<FloatLane>(w.F) * 4));
  size_t vectors = 0;
  carve<FloatLane, float>(nullptr, cut_rows(kDotLimit), w, &vectors);
  b.local = take(static_cast<int64_t>(vectors));
  if (used) *used = static_cast<size_t>(at);
  return b;
}

// Steps [s0, s0 + steps) of two groups of up to 16 weight rows.
struct Piece {
  Strip rows[2] = {};
  int64_t counts[2] = {};
  int64_t s0 = 0, steps = 0;
  bool whole = false;  // 32 rows, of whole steps

  MOEFFN_SMALL const char* at(int64_t r, int64_t s) const {
    return rows[r / kGroup].data + r % kGroup * rows[r / kGroup].stride + (s0 + s) * kStep * 4;
  }
};
MOEFFN_INLINE char* part_of(char* to, int64_t r, int64_t s) {
  return to + (2 * s + r / kGroup) * kSplitStep + r % kGroup * 64;
}

// Splits a piece from step `first` on, with zeros for what there is not.
static void split_piece(const Piece& piece, int64_t first, int64_t elems, char* to) {
  for (int64_t r = 0; r < 2 * kGroup; ++r)
    for (int64_t s = first; s < piece.steps; ++s) {
      const int64_t left = r % kGroup < piece.counts[r / kGroup] ? elems - (piece.s0 + s) * kStep : 0;
      const float* from = reinterpret_cast<const float*>(piece.at(r, s));
      split(left > 0 ? load_upto(from, left) : splat(0.0f), left > W ? load_upto(from + W, left - W) : splat(0.0f),
            part_of(to, r, s));
    }
}

// Whether the piece's rows, from its first step to step `end`, are large enough for tiles: their first elements mostly tell.
static bool large_enough(const Piece& piece, int64_t end, int64_t elems) {
  for (int64_t r = 0; r < 2 * kGroup; ++r) {
    if (r % kGroup >= piece.counts[r / kGroup]) continue;
    const float* row = reinterpret_cast<const float*>(piece.at(r, 0));
    const int64_t n = least(elems, end * kStep) - piece.s0 * kStep;
    int32_t most = 0;
    for (int64_t k = 0; k < n && most < kLeast; k += W) {
      const int32_t some = _mm512_reduce_max_epi32((__m512i)magnitude(load_upto(row + k, n - k)));
      most = some > most ? some : most;
    }
    if (most != 0 && most < kLeast) return false;
  }
  return true;
}

// What is done beside the tiles' multiplications: the first `steps` steps of rows [row, end) of the next piece are split, and
// those of a later one asked for, one step of a row at a time, spread over the 6 products of each step.
class Beside {
 public:
  MOEFFN_SMALL Beside(const Piece& next, const Piece& later, char* to, int64_t row, int64_t end, int64_t steps)
      : next_(next), later_(later), to_(to), row_(row), end_(steps ? end : row), steps_(steps), each_(end - row) {
    start();
  }
  MOEFFN_SMALL void operator()() {
    for (due_ += each_; due_ >= 6; due_ -= 6) {
      if (row_ == end_) return;
      if (later_.whole) {
        _mm_prefetch(ask_, _MM_HINT_T1);
        _mm_prefetch(ask_ + 64, _MM_HINT_T1);
        ask_ += kStep * 4;
      }
      split(load(from_), load(from_ + W), out_);
      from_ += kStep;
      out_ += 2 * kSplitStep;
      if (--left_ == 0) {
        ++row_;
        start();
      }
    }
  }

 private:
  MOEFFN_SMALL void start() {
    left_ = steps_;
    if (row_ == end_) return;
    from_ = reinterpret_cast<const float*>(next_.at(row_, 0));
    if (later_.whole) ask_ = later_.at(row_, 0);
    out_ = part_of(to_, row_, 0);
  }
  const Piece &next_, &later_;
  char *to_, *out_ = nullptr;
  const float* from_ = nullptr;
  const char* ask_ = nullptr;
  int64_t row_, end_, steps_, each_, left_ = 0, due_ = 0;
};

// Steps [s0, s1) of a block's rows of x, and the largest magnitudes so far.
static void split_x(const Part& p, const Block& block, int64_t s0, int64_t s1, const SplitBuffers& buf) {
  const int64_t D = p.w->D;
  for (int64_t m = 0; m < block.rows; m += kGroup) {
    const float* rows[kGroup];
    find_rows<FloatLane, float>(p, block.row + m, block.rows - m, buf.rows, buf.row, rows);
    char* to = buf.tokens + (m / (2 * kGroup) * (s1 - s0) * 2 + m / kGroup % 2) * kSplitStep;
    vi most = s0 ? (vi)_mm512_loadu_si512(buf.most + m) : vi{};
    for (int64_t k = s0 * kStep; k < s1 * kStep; k += kStep, to += 2 * kSplitStep) {
      vf v[2][W];
      for (int half = 0; half < 2; ++half) {
        const int64_t at = k + half * W;
        for (int i = 0; i < W; ++i) v[half][i] = rows[i] && at < D ? load_upto(rows[i] + at, D - at) : splat(0.0f);
        transpose(v[half]);
      }
      for (int i = 0; i < W; ++i) {
        most = larger(most, larger(magnitude(v[0][i]), magnitude(v[1][i])));
        split(v[0][i], v[1][i], to + i * 64);
      }
    }
    _mm512_storeu_si512(buf.most + m, (__m512i)most);
  }
}

// The same of a block's activations, which lie as (groups, F, 16).
static void split_act(const Block& block, int64_t F, int64_t s0, int64_t s1, const SplitBuffers& buf) {
  for (int64_t m = 0; m < block.rows; m += kGroup) {
    const float* act = reinterpret_cast<const float*>(block.act) + m * F;
    char* to = buf.tokens + (m / (2 * kGroup) * (s1 - s0) * 2 + m / kGroup % 2) * kSplitStep;
    vi most = s0 ? (vi)_mm512_loadu_si512(buf.most + m) : vi{};
    for (int64_t k = s0 * kStep; k < s1 * kStep; k += kStep, to += 2 * kSplitStep)
      for (int64_t i = k; i < k + W; ++i) {
        const vf a = i < F ? load(act + i * W) : splat(0.0f), b = i + W < F ? load(act + (i + W) * W) : splat(0.0f);
        most = larger(most, larger(magnitude(a), magnitude(b)));
        split(a, b, to + (i - k) * 64);
      }
    _mm512_storeu_si512(buf.most + m, (__m512i)most);
  }
}

// Whether the sums of tokens of ordinary size are finite. Those of weights that are not, or too large, are not.
static bool finite_sums(const float* tile, const int32_t* most) {
  const vi m = (vi)_mm512_loadu_si512(most);
  vi worst = {};
  for (int64_t i = 0; i < kGroup; ++i) worst = larger(worst, magnitude(load(tile + i * W)));
  return _mm512_mask_reduce_max_epi32(_mm512_cmplt_epi32_mask((__m512i)m, _mm512_set1_epi32(kMost)), (__m512i)worst) <
         kInfinity;
}

// sums[2 i + j] (+)= A_i · B_j over `steps` steps, for two groups of weight rows and one or two of tokens. Each product of
// parts costs four tiles' multiplications and at most one load for two of them.
template <bool kTwo>
static void split_2x(const char* a, const char* b, int64_t steps, float* sums, bool first, Beside beside) {
  begin_sums<kTwo>(sums, first);
  auto weights = [&](int q) __attribute__((always_inline)) {
    _tile_loadd(4, a + q * kGroupBytes, 64);
    _tile_loadd(5, a + kSplitStep + q * kGroupBytes, 64);
  };
  auto tokens = [&](int q) __attribute__((always_inline)) {
    _tile_loadd(6, b + q * kGroupBytes, 64);
    if (kTwo) _tile_loadd(7, b + kSplitStep + q * kGroupBytes, 64);
  };
  auto multiply = [&]() __attribute__((always_inline)) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if (kTwo) {
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  };
  for (int64_t s = 0; s < steps; ++s) {
    weights(0);
    tokens(2);
    multiply();
    beside();
    tokens(1);
    multiply();
    beside();
    weights(1);
    multiply();
    beside();
    tokens(0);
    multiply();
    beside();
    weights(2);
    multiply();
    beside();
    weights(0);
    multiply();
    beside();
    a += 2 * kSplitStep;
    b += 2 * kSplitStep;
  }
  end_sums<kTwo>(sums);
}

// Products of `panels` panels of 32 weight rows with a block's tokens. pack(s0, s1) splits the tokens' steps [s0, s1);
// get(p, rows, counts) gives the rows of panel p; finish(p, g, sums) takes the tiles of groups g and g + 1. False,
// and nothing finished that will stand, if weights are not of ordinary size.
template <class Pack, class Get, class Finish>
static bool split_product(int64_t panels, int64_t groups, int64_t elems, const SplitBuffers& buf, const Pack& pack, const Get& get,
                          const Finish& finish) {
  const Segments cut(groups, elems);
  const int64_t all = round_to(elems, kStep) / kStep, pairs = (groups + 1) / 2;
  const bool once = cut.segments == 1;
  const int64_t fit = kSplitSums / (pairs * 4096), together = once ? panels : fit < 1 ? 1 : fit;
  for (int64_t first = 0; first < panels; first += together)
    for (int64_t s0 = 0; s0 < all; s0 += cut.steps) {
      const int64_t s1 = least(all, s0 + cut.steps), n = s1 - s0, some = (n + kSplitSteps - 1) / kSplitSteps;
      const int64_t pieces = (least(panels, first + together) - first) * some;
      auto piece = [&](int64_t i) {
        Piece x;
        x.s0 = s0 + n * (i % some) / some;
        x.steps = s0 + n * (i % some + 1) / some - x.s0;
        get(first + i / some, x.rows, x.counts);
        x.whole = x.counts[0] == kGroup && x.counts[1] == kGroup && (x.s0 + x.steps) * kStep <= elems;
        return x;
      };
      pack(s0, s1);
      Piece now = piece(0);
      split_piece(now, 0, elems, buf.weights);
      for (int64_t i = 0; i < pieces; ++i) {
        const Piece next = i + 1 < pieces ? piece(i + 1) : Piece(), later = i + kSplitAhead < pieces ? piece(i + kSplitAhead) : Piece();
        if (i % some == 0 && !large_enough(now, s1, elems)) return false;
        char* weights[2] = {buf.weights + i % 2 * kPieceBytes, buf.weights + (i + 1) % 2 * kPieceBytes};
        const int64_t beside_steps = next.whole ? least(now.steps, next.steps) : 0;
        for (int64_t j = 0; j < pairs; ++j) {
          const Beside beside(next, later, weights[1], 2 * kGroup * j / pairs, 2 * kGroup * (j + 1) / pairs, beside_steps);
          float* sums = buf.sums + ((once ? 0 : i / some * pairs) + j) * 1024;
          const char* tokens = buf.tokens + (j * n + now.s0 - s0) * 2 * kSplitStep;
          if (2 * j + 1 < groups)
            split_2x<true>(weights[0], tokens, now.steps, sums, now.s0 == 0, beside);
          else
            split_2x<false>(weights[0], tokens, now.steps, sums, now.s0 == 0, beside);
          if (now.s0 + now.steps < all) continue;
          for (int64_t t = 0; t < 4; ++t)
            if (2 * j + t % 2 < groups && !finite_sums(sums + t * 256, buf.most + (2 * j + t % 2) * kGroup)) return false;
          finish(first + i / some, 2 * j, sums);
        }
        if (next.steps) split_piece(next, beside_steps, elems, weights[1]);
        now = next;
      }
    }
  return true;
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
