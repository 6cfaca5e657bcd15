// The forward tasks of fp32 on AMX tiles. Included after amx_parts.h, in the same namespace.

namespace moeffn {
namespace MOEFFN_NS {

constexpr int64_t kSplitLimit = 48;  // up to so many rows the vector kernels
constexpr int64_t kSplitRows = 512;  // most rows of a block

// Rows [r, r + n) of a block, at most kDotLimit, by the vector kernels.
static Block few_rows(const Block& block, int64_t r, int64_t n, const SplitBuffers& buf) {
  Block few = block;
  few.row += r;
  few.rows = n;
  few.act = reinterpret_cast<char*>(buf.few);
  return few;
}
static void few_up(const Part& p, const Block& block, int64_t r, int64_t n, int64_t f0, int64_t f1, const SplitBuffers& buf) {
  const Block few = few_rows(block, r, n, buf);
  Local local;
  local.data = buf.local;
  up_task<FloatLane, float>(p, few, f0, f1, local);
  const int64_t F = p.w->F, stride = row_lanes<FloatLane>(F);
  float* act = reinterpret_cast<float*>(block.act);
  for (int64_t m = 0; m < n; ++m)
    for (int64_t f = f0; f < f1; ++f) act[((r + m) / W * F + f) * W + (r + m) % W] = buf.few[m * stride + f];
}
static void few_down(const Part& p, const Block& block, int64_t r, int64_t n, int64_t d0, int64_t d1, const SplitBuffers& buf) {
  const int64_t F = p.w->F, stride = row_lanes<FloatLane>(F);
  const float* act = reinterpret_cast<const float*>(block.act);
  for (int64_t m = 0; m < n; ++m) {
    for (int64_t f = 0; f < F; ++f) buf.few[m * stride + f] = act[((r + m) / W * F + f) * W + (r + m) % W];
    memset(buf.few + m * stride + F, 0, static_cast<size_t>(stride - F) * 4);
  }
  const Block few = few_rows(block, r, n, buf);
  Local local;
  local.data = buf.local;
  down_task<FloatLane, float>(p, few, d0, d1, local);
}

// Calls few(r, n) for the rows that the tiles could not do: all, or those not of ordinary size.
template <class Few>
static void rest(const Block& block, bool done, const SplitBuffers& buf, const Few& few) {
  for (int64_t r = 0; r < block.rows; r += done ? 1 : kDotLimit)
    if (!done || !ordinary(buf.most[r])) few(r, done ? 1 : least(kDotLimit, block.rows - r));
}

static void split_up(const Part& p, const Block& block, int64_t f0, int64_t f1, Local& local) {
  if (block.rows <= kSplitLimit) return up_task<FloatLane, float>(p, block, f0, f1, local);
  const Experts& w = *p.w;
  const SplitBuffers buf = carve_split(local.data, block.rows, w, nullptr);
  const int64_t groups = (block.rows + kGroup - 1) / kGroup, span = w.act.gated ? kGroup : 2 * kGroup;
  const int64_t chunk = w.w_in.s2 == 1 ? f1 - f0 : kChunk / 2;
  const bool once = Segments(groups, w.D).segments == 1;
  bool done = true;
  {
    const UseTiles tiles;
    for (int64_t c0 = f0, c1 = f0; done && c0 < f1; c0 = c1) {
      c1 = least(f1, c0 + chunk);
      Strip strips[2];
      up_strips(w, block.expert, c0, c1 - c0, buf.copies, strips);
      auto pack = [&](int64_t s0, int64_t s1) {
        if (local.tile_of == &block) return;
        split_x(p, block, s0, s1, buf);
        local.tile_of = once ? &block : nullptr;
      };
      auto get = [&](int64_t panel, Strip* rows, int64_t* counts) {
        const int64_t at = panel * span, left = c1 - c0 - at;
        const int64_t second = w.act.gated ? left : left - kGroup;
        rows[0] = {strips[0].data + at * strips[0].stride, strips[0].stride};
        rows[1] = w.act.gated ? Strip{strips[1].data + at * strips[1].stride, strips[1].stride}
                              : Strip{rows[0].data + kGroup * rows[0].stride, rows[0].stride};
        counts[0] = least(kGroup, left);
        counts[1] = second > 0 ? least(kGroup, second) : 0;
      };
      int64_t biased = -1;
      auto finish = [&](int64_t panel, int64_t g, float* sums) {
        const int64_t f = c0 + panel * span;
        if (biased != panel) fetch_biases(p, block, f, least(span, c1 - f), buf.bias);
        biased = panel;
        for (int64_t j = 0; j < least(2, groups - g); ++j)
          for (int64_t i = 0; i < (w.act.gated ? 1 : 2); ++i) {
            const int64_t at = f + i * kGroup, row = (g + j) * kGroup;
            if (at >= c1) continue;
            finish_up<FloatLane, float>(p, block.row + row, least(kGroup, block.rows - row), at, least(kGroup, c1 - at),
                                        sums + (2 * i + j) * 256, sums + (2 + j) * 256, W, buf.bias + i * kGroup,
                                        buf.bias + 32 + i * kGroup, reinterpret_cast<float*>(block.act) + row * w.F + at * W);
          }
      };
      done = split_product((c1 - c0 + span - 1) / span, groups, w.D, buf, pack, get, finish);
    }
  }
  rest(block, done, buf, [&](int64_t r, int64_t n) { few_up(p, block, r, n, f0, f1, buf); });
}

static void split_down(const Part& p, const Block& block, int64_t d0, int64_t d1, Local& local) {
  if (block.rows <= kSplitLimit) return down_task<FloatLane, float>(p, block, d0, d1, local);
  const Experts& w = *p.w;
  const SplitBuffers buf = carve_split(local.data, block.rows, w, nullptr);
  local.tile_of = nullptr;
  const int64_t groups = (block.rows + kGroup - 1) / kGroup;
  const int64_t chunk = w.w_out.s2 == 1 ? d1 - d0 : kChunk;
  const bool once = Segments(groups, w.F).segments == 1;
  bool done = true, packed = false;
  {
    const UseTiles tiles;
    for (int64_t c0 = d0, c1 = d0; done && c0 < d1; c0 = c1) {
      c1 = least(d1, c0 + chunk);
      const Strip all = strip(w.w_out, block.expert, c0, c1 - c0, w.F, buf.copies);
      auto pack = [&](int64_t s0, int64_t s1) {
        if (!packed) split_act(block, w.F, s0, s1, buf);
        packed = once;
      };
      auto get = [&](int64_t panel, Strip* rows, int64_t* counts) {
        for (int64_t i = 0; i < 2; ++i) {
          const int64_t at = (2 * panel + i) * kGroup, left = c1 - c0 - at;
          rows[i] = {all.data + at * all.stride, all.stride};
          counts[i] = left > 0 ? least(kGroup, left) : 0;
        }
      };
      int64_t biased = -1;
      auto finish = [&](int64_t panel, int64_t g, float* sums) {
        const int64_t d = c0 + 2 * panel * kGroup;
        if (biased != panel) fetch_bias(w.b_out, block.expert, d, 1, least(2 * kGroup, c1 - d), buf.bias);
        biased = panel;
        for (int64_t j = 0; j < least(2, groups - g); ++j)
          for (int64_t i = 0; i < 2 && d + i * kGroup < c1; ++i) {
            const int64_t row = (g + j) * kGroup, at = d + i * kGroup;
            finish_out<float>(p, block.row + row, least(kGroup, block.rows - row), at, least(kGroup, c1 - at),
                              sums + (2 * i + j) * 256, W, buf.bias + i * kGroup);
          }
      };
      done = split_product((c1 - c0 + 2 * kGroup - 1) / (2 * kGroup), groups, w.F, buf, pack, get, finish);
    }
  }
  rest(block, done, buf, [&](int64_t r, int64_t n) { few_down(p, block, r, n, d0, d1, buf); });
}

static int64_t split_act_bytes(const Part& p, int64_t rows) {
  if (rows <= kSplitLimit) return act_bytes<FloatLane>(p, rows);
  return round_to(rows, kGroup) * p.w->F * 4;
}
static int64_t split_max_rows(const Part&) { return kSplitRows; }
static size_t split_local_bytes(const Part& p, int64_t rows) {
  if (rows <= kSplitLimit) return local_bytes<FloatLane, float>(p, rows);
  size_t used = 0;
  carve_split(nullptr, rows, *p.w, &used);
  return used;
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
