// The forward tasks on AMX tiles, bf16 only. Included after ffn.h, in the same namespace.
//
// The product is taken transposed: C (16 weight rows x 16 tokens) += A (16 weight rows x 32) · B (32 x 16 tokens). So
// plain row-major weights are the A operand as they lie, and no packed copy of them exists; the few activations are
// packed to B: per group of 16 tokens, [k / 2][token][k % 2]. A tile of C holds, after the activation, two of its rows
// side by side in just that order, so the up projection writes the down projection's B without another shuffle.

namespace moeffn {
namespace MOEFFN_NS {

constexpr int64_t kGroup = 16;      // tokens in a tile
constexpr int64_t kStep = 32;       // elements of a tile along the sum
constexpr int64_t kTileDotLimit = 4;  // up to so many rows the dot form streams weights as fast
constexpr int64_t kGroupBytes = kGroup * kStep * 2;
constexpr int64_t kTileShare = 3 << 18;  // bytes of packed activations that stay in L2 beside the weights
constexpr int64_t kSumsBytes = 1 << 18;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The tile registers' configuration belongs to the thread, which oneDNN may have set: put back what was there.
class UseTiles {
 public:
  UseTiles() {
    _tile_storeconfig(&before_);
    static const TileConfig config;
    _tile_loadconfig(&config);
  }
  ~UseTiles() {
    if (before_.palette)
      _tile_loadconfig(&before_);
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
  char* copies;   // 4 x (16, round32(max(D, F))): rows that cannot be read where they lie
  char* tails;    // 4 x (16, 32)
  float* sums;    // (16, 16) tiles
  float* bias;    // 2 x 64
  float* row;     // as Buffers::row
  bf16* rows;     // (16, row_lanes(D)): rows of x before packing
};

MOEFFN_INLINE TileBuffers carve_tiles(char* data, int64_t rows, int64_t D, int64_t F, size_t* used) {
  int64_t at = 0;
  auto take = [&](int64_t bytes) {
    char* p = data ? data + at : nullptr;
    at += round_to(bytes, 64);
    return p;
  };
  const int64_t widest = round_to(D > F ? D : F, kStep);
  TileBuffers b;
  b.x = take(round_to(rows, kGroup) * round_to(D, kStep) * 2);
  b.copies = take(4 * kGroup * widest * 2);
  b.tails = take(4 * kGroupBytes);
  b.sums = reinterpret_cast<float*>(take(kSumsBytes + round_to(rows, 2 * kGroup) * 128));
  b.bias = reinterpret_cast<float*>(take(128 * 4));
  b.row = reinterpret_cast<float*>(take(round_to(D, W) * 4));
  b.rows = reinterpret_cast<bf16*>(take(kGroup * row_lanes<PairLane>(D) * 4));
  if (used) *used = static_cast<size_t>(at);
  return b;
}

// Rows first, first + step, ... of one expert's matrix as tile `index`; rows past `count` are zero.
static Rows16 rows16(const Array& w, int64_t expert, int64_t first, int64_t step, int64_t count, int64_t elems, int index,
                     const TileBuffers& buf) {
  const bf16* from = static_cast<const bf16*>(w.at(expert, first));
  const int64_t row = step * w.s1, padded = round_to(elems, kStep);
  if (count < kGroup || w.s2 != 1) {
    bf16* to = reinterpret_cast<bf16*>(buf.copies) + index * kGroup * padded;
    memset(to, 0, static_cast<size_t>(kGroup * padded) * 2);
    for (int64_t j0 = 0; j0 < elems; j0 += 64)
      for (int64_t i = 0; i < count; ++i)
        for (int64_t j = j0; j < least(elems, j0 + 64); ++j) to[i * padded + j] = from[i * row + j * w.s2];
    return {reinterpret_cast<const char*>(to), padded * 2, reinterpret_cast<const char*>(to + elems / kStep * kStep)};
  }
  Rows16 r{reinterpret_cast<const char*>(from), row * 2, nullptr};
  const int64_t full = elems / kStep * kStep;
  if (full < elems) {
    bf16* tail = reinterpret_cast<bf16*>(buf.tails + index * kGroupBytes);
    memset(tail, 0, static_cast<size_t>(kGroupBytes));
    for (int64_t i = 0; i < kGroup; ++i)
      memcpy(tail + i * kStep, from + i * row + full, static_cast<size_t>(elems - full) * 2);
    r.tail = reinterpret_cast<const char*>(tail);
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

// sums[2 i + j] (+)= A_i · B_j over steps [k0, k1), for two groups of 16 rows and two groups of 16 tokens.
static void tiles_2x2(const Rows16* a, const char* b0, const char* b1, int64_t elems, int64_t k0, int64_t k1, float* sums,
                      const Ahead& ahead) {
  if (k0 == 0) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + 256, 64);
    _tile_loadd(2, sums + 512, 64);
    _tile_loadd(3, sums + 768, 64);
  }
  const int64_t full = least(k1, elems / kStep);
  const char *p0 = a[0].data, *p1 = a[1].data;
  const int64_t s0 = a[0].stride, s1 = a[1].stride;
  for (int64_t k = k0; k < full; ++k) {
    _tile_loadd(4, p0 + k * 64, s0);
    _tile_loadd(6, b0 + k * kGroupBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b1 + k * kGroupBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, p1 + k * 64, s1);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    if (ahead.rows) ask(a, ahead, k);
  }
  if (full < k1) {
    _tile_loadd(4, a[0].tail, tail_stride(a[0], elems));
    _tile_loadd(5, a[1].tail, tail_stride(a[1], elems));
    _tile_loadd(6, b0 + full * kGroupBytes, 64);
    _tile_loadd(7, b1 + full * kGroupBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
}

// sums[i] = A_i · B, for four groups of 16 rows and one group of tokens.
static void tiles_4x1(const Rows16* a, const char* b, int64_t elems, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int64_t steps = elems / kStep;
  for (int64_t k = 0; k < steps; ++k) {
    _tile_loadd(4, b + k * kGroupBytes, 64);
    _tile_loadd(5, a[0].data + k * 64, a[0].stride);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, a[1].data + k * 64, a[1].stride);
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(7, a[2].data + k * 64, a[2].stride);
    _tile_dpbf16ps(2, 7, 4);
    _tile_loadd(5, a[3].data + k * 64, a[3].stride);
    _tile_dpbf16ps(3, 5, 4);
  }
  if (steps * kStep < elems) {
    _tile_loadd(4, b + steps * kGroupBytes, 64);
    _tile_loadd(5, a[0].tail, tail_stride(a[0], elems));
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, a[1].tail, tail_stride(a[1], elems));
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(7, a[2].tail, tail_stride(a[2], elems));
    _tile_dpbf16ps(2, 7, 4);
    _tile_loadd(5, a[3].tail, tail_stride(a[3], elems));
    _tile_dpbf16ps(3, 5, 4);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
}

// Products of `panels` panels of 32 weight rows with all groups of tokens. get(p, a) gives panel p's rows, which start
// `advance` rows behind those of p - 1; finish(p, g, sums) takes the tiles of groups g and g + 1.
template <class Get, class Finish>
static void tile_product(int64_t panels, int64_t groups, int64_t elems, const char* b, int64_t advance, float* sums,
                         const Get& get, const Finish& finish) {
  const int64_t steps = round_to(elems, kStep) / kStep, group = steps * kGroupBytes, pairs = (groups + 1) / 2;
  // The part of B in use stays in L2, at the price of sums that are stored and loaded again.
  const int64_t blocks = (groups * group + kTileShare - 1) / kTileShare;
  const int64_t per_block = (steps + blocks - 1) / blocks;
  const int64_t together = blocks == 1 ? 1 : kSumsBytes / (pairs * 4096) > 1 ? kSumsBytes / (pairs * 4096) : 1;
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
          float* s = sums + ((p - first) * pairs + j) * 1024 * (blocks > 1);
          const char* b0 = b + 2 * j * group;
          tiles_2x2(a, b0, 2 * j + 1 < groups ? b0 + group : b0, elems, k0, k1, s, ahead);
          if (k1 == steps) finish(p, 2 * j, s);
        }
      }
    }
}

// Packs 16 rows (stride in elements; nullptr: zeros) of `elems` elements to B order.
static void pack_group(const bf16* const* rows, int64_t elems, char* to) {
  for (int64_t k = 0; k < elems; k += kStep, to += kGroupBytes) {
    vf block[W];
    if (elems - k >= kStep) {
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) block[i] = rows[i] ? PairLane::lanes(rows[i] + k) : splat(0.0f);
    } else {
      for (int i = 0; i < W; ++i) block[i] = rows[i] ? PairLane::lanes_part(rows[i] + k, elems - k) : splat(0.0f);
    }
    transpose(block);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) store(reinterpret_cast<float*>(to) + i * W, block[i]);
  }
}

static void pack_x(const Part& p, const Block& block, const TileBuffers& buf) {
  const int64_t D = p.w->D, group = kGroup * round_to(D, kStep) * 2;
  for (int64_t m = 0; m < block.rows; m += kGroup) {
    const bf16* rows[kGroup] = {};
    for (int64_t i = 0; i < least(kGroup, block.rows - m); ++i) {
      const int64_t row = block.row + m + i;
      if (p.x.s1 == 1 && !p.in_scale) {
        const int64_t slot = p.plan.slot_of_row ? p.plan.slot_of_row[row] : row;
        rows[i] = static_cast<const bf16*>(p.x.at(slot / p.plan.K));
      } else {
        bf16* to = buf.rows + i * row_lanes<PairLane>(D) * 2;
        gather_row<PairLane, bf16>(p, row, reinterpret_cast<float*>(to), buf.row);
        rows[i] = to;
      }
    }
    pack_group(rows, D, buf.x + m / kGroup * group);
  }
}

MOEFFN_INLINE vu pair_bits(vf even, vf odd) {
  const __m512i lo = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)even));
  const __m512i hi = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)odd));
  return (vu)_mm512_or_si512(lo, _mm512_slli_epi32(hi, 16));
}

// Writes the first `tokens` columns of a (16 x 16) tile of sums as rows of bf16, `n` <= 16 elements each.
template <class To>
static void write_columns(const float* sums, int64_t tokens, int64_t n, const To& to) {
  vf t[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) t[i] = load(sums + i * W);
  transpose(t);
  for (int64_t m = 0; m < tokens; ++m) store_upto(to(m), t[m], n);
}

static void save_h(const Part& p, const Block& block, int64_t m0, int64_t f, int64_t n, const float* gate, const float* up) {
  const Experts& w = *p.w;
  const int64_t tokens = least(kGroup, block.rows - m0);
  bf16* h = static_cast<bf16*>(p.h) + (block.row + m0) * w.in_rows() + f * w.gate_step();
  if (w.gate_step() == 1) {
    write_columns(gate, tokens, n, [&](int64_t m) { return h + m * w.in_rows(); });
    if (w.act.gated) write_columns(up, tokens, n, [&](int64_t m) { return h + w.up_shift() + m * w.in_rows(); });
    return;
  }
  for (int64_t m = 0; m < tokens; ++m)
    for (int64_t i = 0; i < n; ++i) {
      put(h + m * w.in_rows() + 2 * i, gate[i * W + m]);
      put(h + m * w.in_rows() + 2 * i + 1, up[i * W + m]);
    }
}

static void fetch_biases(const Part& p, const Block& block, int64_t f, int64_t n, const TileBuffers& buf) {
  const Experts& w = *p.w;
  if (!w.b_in.data && !p.h) return;  // nobody reads them
  fetch_bias(w.b_in, block.expert, f * w.gate_step(), w.gate_step(), n, buf.bias);
  if (w.act.gated) fetch_bias(w.b_in, block.expert, f * w.gate_step() + w.up_shift(), w.gate_step(), n, buf.bias + 64);
}

// One tile of gate sums and one of up sums (hidden units f.., tokens m0..) -> h, and act in B order.
static void finish_tile(const Part& p, const Block& block, int64_t m0, int64_t f, int64_t n, float* gate, float* up,
                        const float* bias_g, const float* bias_u) {
  const Experts& w = *p.w;
  const int64_t group = kGroup * round_to(w.F, kStep) * 2;
  char* to = block.act + m0 / kGroup * group + f * kGroup * 2;
  if (w.b_in.data || p.h) {
    for (int64_t i = 0; i < n; ++i) {
      store(gate + i * W, load(gate + i * W) + bias_g[i]);
      if (w.act.gated) store(up + i * W, load(up + i * W) + bias_u[i]);
    }
    if (p.h) save_h(p, block, m0, f, n, gate, up);
  }
  for (int64_t i = 0; i < kGroup; i += 2) {
    vf v[2];
    for (int64_t j = 0; j < 2; ++j)
      v[j] = i + j < n ? hidden(w.act, load(gate + (i + j) * W), w.act.gated ? load(up + (i + j) * W) : splat(0.0f))
                       : splat(0.0f);
    const vu bits = pair_bits(v[0], v[1]);
    memcpy(to + i / 2 * 64, &bits, 64);
  }
  // The sum of the down projection runs to a multiple of 32.
  if (f + kGroup >= w.F && f / kGroup % 2 == 0) memset(to + kGroup * kGroup * 2, 0, kGroup * kGroup * 2);
}

// Four tiles of weights share the only group of tokens.
static void tile_up_narrow(const Part& p, const Block& block, int64_t f0, int64_t f1, const TileBuffers& buf) {
  const Experts& w = *p.w;
  const int64_t step = w.gate_step(), span = (w.act.gated ? 2 : 4) * kGroup;
  for (int64_t f = f0; f < f1; f += span) {
    Rows16 a[4];
    int64_t count[4], unit[4];
    for (int i = 0; i < 4; ++i) {
      unit[i] = f + (w.act.gated ? i / 2 : i) * kGroup;
      const int64_t left = f1 - unit[i];
      count[i] = left < 0 ? 0 : least(kGroup, left);
      const int64_t row = (count[i] ? unit[i] : f) * step + (w.act.gated && i % 2 ? w.up_shift() : 0);
      a[i] = rows16(w.w_in, block.expert, row, step, count[i], w.D, i, buf);
    }
    fetch_biases(p, block, f, least(span, f1 - f), buf);
    tiles_4x1(a, buf.x, w.D, buf.sums);
    for (int i = 0; i < 4; i += w.act.gated ? 2 : 1)
      if (count[i])
        finish_tile(p, block, 0, unit[i], count[i], buf.sums + i * 256, buf.sums + (i + w.act.gated) * 256,
                    buf.bias + (unit[i] - f), buf.bias + 64 + (unit[i] - f));
  }
}

static void tile_up(const Part& p, const Block& block, int64_t f0, int64_t f1, Local& local) {
  if (block.rows <= kTileDotLimit) return up_task<PairLane, bf16>(p, block, f0, f1, local);
  const Experts& w = *p.w;
  const TileBuffers buf = carve_tiles(local.data, block.rows, w.D, w.F, nullptr);
  if (local.tile_of != &block) {
    pack_x(p, block, buf);
    local.tile_of = &block;
  }
  const UseTiles tiles;
  const int64_t groups = (block.rows + kGroup - 1) / kGroup;
  if (groups == 1) return tile_up_narrow(p, block, f0, f1, buf);
  const int64_t step = w.gate_step(), span = w.act.gated ? kGroup : 2 * kGroup;
  int64_t biased = -1;
  auto get = [&](int64_t panel, Rows16* a) {
    const int64_t f = f0 + panel * span, left = f1 - f;
    a[0] = rows16(w.w_in, block.expert, f * step, step, least(kGroup, left), w.D, 0, buf);
    const int64_t second = left > kGroup ? least(kGroup, left - kGroup) : 0;
    a[1] = w.act.gated ? rows16(w.w_in, block.expert, f * step + w.up_shift(), step, least(kGroup, left), w.D, 1, buf)
                       : rows16(w.w_in, block.expert, second ? f + kGroup : f, 1, second, w.D, 1, buf);
  };
  auto finish = [&](int64_t panel, int64_t g, float* sums) {
    const int64_t f = f0 + panel * span;
    if (biased != panel) fetch_biases(p, block, f, least(span, f1 - f), buf);
    biased = panel;
    for (int64_t j = 0; j < least(2, groups - g); ++j)
      for (int64_t i = 0; i < (w.act.gated ? 1 : 2); ++i)
        if (f + i * kGroup < f1)
          finish_tile(p, block, (g + j) * kGroup, f + i * kGroup, least(kGroup, f1 - f - i * kGroup),
                      sums + (2 * i + j) * 256, sums + (2 + j) * 256, buf.bias + i * kGroup, buf.bias + 64 + i * kGroup);
  };
  tile_product((f1 - f0 + span - 1) / span, groups, w.D, buf.x, span, buf.sums, get, finish);
}

// Two tiles (rows d.., tokens m0..) of the down projection -> out.
static void finish_out(const Part& p, const Block& block, int64_t m0, int64_t d, int64_t n, const float* sums,
                       const float* bias) {
  const int64_t tokens = least(kGroup, block.rows - m0);
  vf t[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) t[i] = load(sums + i * W);
  transpose(t);
  const vf b = load_upto(bias, n);
  for (int64_t m = 0; m < tokens; ++m) {
    const int64_t row = block.row + m0 + m;
    const int64_t slot = p.plan.slot_of_row ? p.plan.slot_of_row[row] : row;
    const float scale = p.out_scale ? p.out_scale[slot] : 1.0f;
    store_upto(reinterpret_cast<bf16*>(p.out) + (slot - p.first_slot) * p.w->D + d, (t[m] + b) * scale, n);
  }
}

static void tile_down(const Part& p, const Block& block, int64_t d0, int64_t d1, Local& local) {
  if (block.rows <= kTileDotLimit) return down_task<PairLane, bf16>(p, block, d0, d1, local);
  const Experts& w = *p.w;
  const TileBuffers buf = carve_tiles(local.data, block.rows, w.D, w.F, nullptr);
  const UseTiles tiles;
  const int64_t groups = (block.rows + kGroup - 1) / kGroup;
  auto tile = [&](int64_t d, int index) {
    const int64_t left = d1 - d, count = left < 0 ? 0 : least(kGroup, left);
    return rows16(w.w_out, block.expert, count ? d : d0, 1, count, w.F, index, buf);
  };
  if (groups == 1) {
    for (int64_t d = d0; d < d1; d += 4 * kGroup) {
      Rows16 a[4];
      for (int i = 0; i < 4; ++i) a[i] = tile(d + i * kGroup, i);
      fetch_bias(w.b_out, block.expert, d, 1, least(4 * kGroup, d1 - d), buf.bias);
      tiles_4x1(a, block.act, w.F, buf.sums);
      for (int i = 0; i < 4 && d + i * kGroup < d1; ++i)
        finish_out(p, block, 0, d + i * kGroup, least(kGroup, d1 - d - i * kGroup), buf.sums + i * 256,
                   buf.bias + i * kGroup);
    }
    return;
  }
  int64_t biased = -1;
  auto get = [&](int64_t panel, Rows16* a) {
    for (int i = 0; i < 2; ++i) a[i] = tile(d0 + (2 * panel + i) * kGroup, i);
  };
  auto finish = [&](int64_t panel, int64_t g, float* sums) {
    const int64_t d = d0 + 2 * panel * kGroup;
    if (biased != panel) fetch_bias(w.b_out, block.expert, d, 1, least(2 * kGroup, d1 - d), buf.bias);
    biased = panel;
    for (int64_t j = 0; j < least(2, groups - g); ++j)
      for (int64_t i = 0; i < 2 && d + i * kGroup < d1; ++i)
        finish_out(p, block, (g + j) * kGroup, d + i * kGroup, least(kGroup, d1 - d - i * kGroup),
                   sums + (2 * i + j) * 256, buf.bias + i * kGroup);
  };
  tile_product((d1 - d0 + 2 * kGroup - 1) / (2 * kGroup), groups, w.F, block.act, 2 * kGroup, buf.sums, get, finish);
}

static int64_t tile_act_bytes(const Part& p, int64_t rows) {
  if (rows <= kTileDotLimit) return act_bytes<PairLane>(p, rows);
  return round_to(rows, kGroup) * round_to(p.w->F, kStep) * 2;
}

static int64_t tile_max_rows(const Part& p) {
  const int64_t n = (1 << 20) / (round_to(p.w->D, kStep) * 2) / kGroup * kGroup;
  return n < kGroup ? kGroup : least(n, 512);
}

static size_t tile_local_bytes(const Part& p, int64_t rows) {
  if (rows <= kTileDotLimit) return local_bytes<PairLane>(p, rows);
  size_t used = 0;
  carve_tiles(nullptr, rows, p.w->D, p.w->F, &used);
  return used;
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
