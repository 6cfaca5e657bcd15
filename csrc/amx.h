// The forward tasks on AMX tiles, bf16 only. Included after amx_tiles.h, in the same namespace.

namespace moeffn {
namespace MOEFFN_NS {

static void pack_x(const Part& p, const Block& block, const TileBuffers& buf) {
  const int64_t D = p.w->D, group = kGroup * round_to(D, kStep) * 2;
  for (int64_t m = 0; m < block.rows; m += kGroup) {
    const bf16* rows[kGroup];
    find_rows<PairLane, bf16>(p, block.row + m, block.rows - m, reinterpret_cast<float*>(buf.rows), buf.row, rows);
    pack_group(rows, tile_tokens(block.rows), D, buf.x + m / kGroup * group);
  }
}

static void fetch_biases(const Part& p, const Block& block, int64_t f, int64_t n, float* to) {
  const Experts& w = *p.w;
  if (!w.b_in.data && !p.h) return;  // nobody reads them
  fetch_bias(w.b_in, block.expert, f * w.gate_step(), w.gate_step(), n, to);
  if (w.act.gated) fetch_bias(w.b_in, block.expert, f * w.gate_step() + w.up_shift(), w.gate_step(), n, to + 32);
}

// finish_up for sums (n, tokens) of 4 or 8 tokens: a vector holds several units. What is stored for a unit past an odd F
// meets zeros of the weights.
static void finish_few(const Part& p, const Block& block, int64_t tokens, int64_t f, int64_t n, float* gate, float* up,
                       const float* bias_g, const float* bias_u, float* act) {
  const Experts& w = *p.w;
  if (w.b_in.data || p.h) {
    for (int64_t i = 0; i < n * tokens; ++i) {
      gate[i] += bias_g[i / tokens];
      if (w.act.gated) up[i] += bias_u[i / tokens];
    }
    if (p.h) save_h<bf16>(p, block.row, block.rows, f, n, gate, up, tokens);
  }
  for (int64_t i = 0; i < n * tokens; i += 2 * W) {
    __m512 v[2];
    for (int64_t j = 0; j < 2; ++j) {
      const int64_t at = i + j * W, left = n * tokens - at;
      const vf u = w.act.gated && left > 0 ? load_upto(up + at, left) : splat(0.0f);
      v[j] = (__m512)(left > 0 ? hidden(w.act, load_upto(gate + at, left), u) : splat(0.0f));
    }
    vf units[2];  // even and odd ones
    if (tokens == 4) {
      units[0] = (vf)_mm512_shuffle_f32x4(v[0], v[1], 0x88);
      units[1] = (vf)_mm512_shuffle_f32x4(v[0], v[1], 0xdd);
    } else {
      units[0] = (vf)_mm512_shuffle_f32x4(v[0], v[1], 0x44);
      units[1] = (vf)_mm512_shuffle_f32x4(v[0], v[1], 0xee);
    }
    store_upto(act + i / 2, PairLane::join(units), ((n * tokens - i) / tokens + 1) / 2 * tokens);
  }
}

// One tile of gate sums and one of up sums (hidden units f.., tokens m0..) -> h, and act in B order.
static void finish_tile(const Part& p, const Block& block, int64_t m0, int64_t f, int64_t n, float* gate, float* up,
                        const float* bias_g, const float* bias_u) {
  const int64_t F = p.w->F, padded = round_to(F, kStep);  // the sum of the down projection runs to a multiple of 32
  const int64_t tokens = tile_tokens(block.rows);
  float* act = reinterpret_cast<float*>(block.act + m0 / kGroup * kGroup * padded * 2) + f / 2 * tokens;
  if (tokens == kGroup)
    finish_up<PairLane, bf16>(p, block.row + m0, least(kGroup, block.rows - m0), f, n, gate, up, W, bias_g, bias_u, act);
  else
    finish_few(p, block, tokens, f, n, gate, up, bias_g, bias_u, act);
  const int64_t lanes = (n + 1) / 2;
  if (f + n == F) memset(act + lanes * tokens, 0, static_cast<size_t>((padded - f) / 2 - lanes) * tokens * 4);
}

// Rows [f0, f1) of the hidden units: a panel is a tile of gate rows and one of up rows, or two tiles when not gated.
static void tile_up(const Part& p, const Block& block, int64_t f0, int64_t f1, Local& local) {
  if (block.rows <= kTileDotLimit) return up_task<PairLane, bf16>(p, block, f0, f1, local);
  const Experts& w = *p.w;
  const TileBuffers buf = carve_tiles(local.data, block.rows, w, nullptr);
  if (local.tile_of != &block) {
    pack_x(p, block, buf);
    local.tile_of = &block;
  }
  const int64_t tokens = tile_tokens(block.rows);
  const UseTiles tiles(tokens);
  const int64_t groups = (block.rows + kGroup - 1) / kGroup;
  const int64_t span = w.act.gated ? kGroup : 2 * kGroup;
  const int64_t chunk = w.w_in.s2 == 1 ? f1 - f0 : kChunk / 2;  // as many rows as can be copied
  for (int64_t c0 = f0, c1 = f0; c0 < f1; c0 = c1) {
    c1 = least(f1, c0 + chunk);
    Strip strips[2];
    up_strips(w, block.expert, c0, c1 - c0, buf.copies, strips);
    if (streams(groups, w.D)) {
      const int64_t grain = tokens == 4 ? 8 : 4;  // units in whole vectors
      auto finish = [&](int64_t r, int64_t m, int64_t g, float* sums) {
        if (g == 0) fetch_biases(p, block, c0 + r, m, buf.bias);
        finish_tile(p, block, g * kGroup, c0 + r, m, sums, sums + kRing / 2 * tokens, buf.bias, buf.bias + 32);
      };
      const int64_t count = w.act.gated ? 2 : 1;
      if (groups > 2)
        stream_product<true>(strips, count, c1 - c0, groups, tokens, w.D, buf.x, grain, buf, finish);
      else
        stream_product<false>(strips, count, c1 - c0, groups, tokens, w.D, buf.x, grain, buf, finish);
      continue;
    }
    int64_t biased = -1;
    auto get = [&](int64_t panel, Rows16* a) {
      const int64_t at = panel * span, left = c1 - c0 - at;
      a[0] = rows16(strips[0], at, least(kGroup, left), w.D, 0, buf);
      const int64_t second = left > kGroup ? least(kGroup, left - kGroup) : 0;
      a[1] = w.act.gated ? rows16(strips[1], at, least(kGroup, left), w.D, 1, buf)
                         : rows16(strips[0], second ? at + kGroup : at, second, w.D, 1, buf);
    };
    const int64_t grain = 4, slices = kGroup / grain;  // of a tile
    auto finish = [&](int64_t panel, int64_t g, int64_t piece, float* sums) {
      const int64_t i = piece / (2 * slices), j = piece / slices % 2, r = piece % slices * grain;
      const int64_t f = c0 + panel * span, at = f + i * kGroup + r;
      if (biased != panel) fetch_biases(p, block, f, least(span, c1 - f), buf.bias);
      biased = panel;
      if (g + j < groups && at < c1)
        finish_tile(p, block, (g + j) * kGroup, at, least(grain, c1 - at), sums + (2 * i + j) * 256 + r * W,
                    sums + (2 + j) * 256 + r * W, buf.bias + i * kGroup + r, buf.bias + 32 + i * kGroup + r);
    };
    tile_product((c1 - c0 + span - 1) / span, groups, w.D, buf.x, span, buf.sums, span / grain * 2, get, finish);
  }
}

// Sums of group g -> columns [d, d + n) of out. The lines that the next 32 columns go to are asked for: the tokens' rows are
// not in the cache, and stores that wait for them hold up those of the tiles.
static void finish_columns(const Part& p, const Block& block, int64_t g, int64_t d, int64_t n, const float* sums,
                           const float* bias) {
  const int64_t row = block.row + g * kGroup, tokens = least(kGroup, block.rows - g * kGroup);
  finish_out<bf16>(p, row, tokens, d, n, sums, tile_tokens(block.rows), bias);
  const bf16* next = p.out.at<bf16>(p.out.first, d) + 2 * kGroup;
  for (int64_t m = 0; m < tokens; ++m)
    _mm_prefetch(reinterpret_cast<const char*>(next + (slot_of(p, row + m) - p.out.first) * p.out.width), _MM_HINT_T0);
}

static void tile_down(const Part& p, const Block& block, int64_t d0, int64_t d1, Local& local) {
  if (block.rows <= kTileDotLimit) return down_task<PairLane, bf16>(p, block, d0, d1, local);
  const Experts& w = *p.w;
  const TileBuffers buf = carve_tiles(local.data, block.rows, w, nullptr);
  const int64_t tokens = tile_tokens(block.rows);
  const UseTiles tiles(tokens);
  const int64_t groups = (block.rows + kGroup - 1) / kGroup;
  const int64_t chunk = w.w_out.s2 == 1 ? d1 - d0 : kChunk;
  for (int64_t c0 = d0, c1 = d0; c0 < d1; c0 = c1) {
    c1 = least(d1, c0 + chunk);
    const Strip rows = strip(w.w_out, block.expert, c0, c1 - c0, w.F, buf.copies);
    if (streams(groups, w.F)) {
      auto finish = [&](int64_t r, int64_t m, int64_t g, float* sums) {
        if (g == 0) fetch_bias(w.b_out, block.expert, c0 + r, 1, m, buf.bias);
        finish_columns(p, block, g, c0 + r, m, sums, buf.bias);
      };
      if (groups > 2)
        stream_product<true>(&rows, 1, c1 - c0, groups, tokens, w.F, block.act, 2 * kGroup, buf, finish);
      else
        stream_product<false>(&rows, 1, c1 - c0, groups, tokens, w.F, block.act, 2 * kGroup, buf, finish);
      continue;
    }
    int64_t biased = -1;
    auto get = [&](int64_t panel, Rows16* a) {
      for (int i = 0; i < 2; ++i) {
        const int64_t at = (2 * panel + i) * kGroup, left = c1 - c0 - at;
        a[i] = rows16(rows, left > 0 ? at : 0, left > 0 ? least(kGroup, left) : 0, w.F, i, buf);
      }
    };
    auto finish = [&](int64_t panel, int64_t g, int64_t piece, float* sums) {
      const int64_t i = piece / 2, j = piece % 2, d = c0 + 2 * panel * kGroup, at = d + i * kGroup;
      if (biased != panel) fetch_bias(w.b_out, block.expert, d, 1, least(2 * kGroup, c1 - d), buf.bias);
      biased = panel;
      if (g + j < groups && at < c1)
        finish_columns(p, block, g + j, at, least(kGroup, c1 - at), sums + piece * 256, buf.bias + i * kGroup);
    };
    tile_product((c1 - c0 + 2 * kGroup - 1) / (2 * kGroup), groups, w.F, block.act, 2 * kGroup, buf.sums, 4, get, finish);
  }
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
  if (rows <= kTileDotLimit) return local_bytes<PairLane, bf16>(p, rows);
  size_t used = 0;
  carve_tiles(nullptr, rows, *p.w, &used);
  return used;
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
