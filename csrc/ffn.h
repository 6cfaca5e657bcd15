// The tasks of the forward pass for one instruction set, over any dtypes. Included after tiles.h and act.h.
//
// up:   gather rows of x into a tile, multiply by a range of w_in's rows, bias, activation -> act (a tile itself)
// down: act · a range of w_out's rows, bias -> out
// Few rows (kDotLimit): dot products straight from the weights as they lie, each byte read once. More: panels of weights
// are transposed into L2 and multiplied by register blocks.

namespace moeffn {
namespace MOEFFN_NS {

constexpr int64_t kDotLimit = 8;
constexpr int64_t kTileBytes = 3 << 20;  // one block of rows where possible: a second one packs the weights again

// Pieces of Local::data; with data == nullptr only their total size is of interest.
struct Buffers {
  float* tile;   // (rows, row_lanes(D))
  float* panel;  // (kLaneBlock, kPanel)
  float* sums;   // (rows, kPanel)
  float* bias;   // (kPanel,)
  void* copies;  // kPanel rows of weights, for weights whose rows are not contiguous
  float* row;    // (max(D, kPanel),) one row of x as floats
};

template <class L>
MOEFFN_INLINE Buffers carve(char* data, int64_t rows, int64_t D, int64_t F, int64_t weight_bytes, bool copies, size_t* used) {
  int64_t at = 0;
  auto take = [&](int64_t bytes) {
    char* p = data ? data + at : nullptr;
    at += round_to(bytes, 64);
    return p;
  };
  Buffers b;
  b.tile = reinterpret_cast<float*>(take(rows * row_lanes<L>(D) * 4));
  b.panel = reinterpret_cast<float*>(take(kLaneBlock * kPanel * 4));
  b.sums = reinterpret_cast<float*>(take(rows * kPanel * 4));
  b.bias = reinterpret_cast<float*>(take(kPanel * 4));
  b.row = reinterpret_cast<float*>(take(round_to(D, W) * 4));
  b.copies = take(copies ? kPanel * (D > F ? D : F) * weight_bytes : 0);
  if (used) *used = static_cast<size_t>(at);
  return b;
}

// Row r of the block's tile: the token's row of x, scaled first when the routing weights scale the input.
template <class L, class XT>
static void gather_row(const Part& p, int64_t row, float* to, float* tmp) {
  const int64_t D = p.w->D;
  const int64_t slot = p.plan.slot_of_row ? p.plan.slot_of_row[row] : row;
  const XT* x = static_cast<const XT*>(p.x.at(slot / p.plan.K));
  const int64_t step = p.x.s1, lanes = row_lanes<L>(D);
  using Elem = typename L::Elem;
  Elem* out = reinterpret_cast<Elem*>(to);
  const int64_t padded = lanes * L::kPerLane;
  if (!p.in_scale && step == 1 && sizeof(XT) == sizeof(Elem)) {
    memcpy(out, x, static_cast<size_t>(D) * sizeof(Elem));  // the tile's own dtype
  } else {
    if (step == 1) {
      for (int64_t d = 0; d < D; d += W) store_upto(tmp + d, load_upto(x + d, D - d), D - d);
    } else {
      for (int64_t d = 0; d < D; ++d) tmp[d] = get(x + d * step);
    }
    if (p.in_scale) {  // rounded to the dtype of x, as x * weight would be
      const float w = p.in_scale[slot];
      XT rounded[W];
      for (int64_t d = 0; d < D; d += W) {
        store(rounded, load_upto(tmp + d, D - d) * w);
        store_upto(tmp + d, load(rounded), D - d);
      }
    }
    for (int64_t d = 0; d < D; d += W) store_upto(out + d, load_upto(tmp + d, D - d), D - d);
  }
  memset(out + D, 0, static_cast<size_t>(padded - D) * sizeof(Elem));
}

template <class L>
static void gather(const Part& p, const Block& block, const Buffers& buf) {
  const int64_t stride = row_lanes<L>(p.w->D);
  with_type(p.x.data, p.x.dtype, [&](auto* x) {
    using XT = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
    for (int64_t m = 0; m < block.rows; ++m)
      gather_row<L, XT>(p, block.row + m, buf.tile + m * stride, buf.row);
  });
}

MOEFFN_INLINE void fetch_bias(const Array& b, int64_t expert, int64_t first, int64_t step, int64_t n, float* to) {
  if (!b.data) {
    for (int64_t i = 0; i < n; ++i) to[i] = 0.0f;
    return;
  }
  with_type(b.data, b.dtype, [&](auto* p) {
    p += expert * b.s0 + first * b.s1;
    for (int64_t i = 0; i < n; ++i) to[i] = get(p + i * step * b.s1);
  });
}

// One row of sums (gate values g, up values u, n columns from f) -> h and act.
template <class L, class XT>
static void finish_up(const Part& p, const Block& block, int64_t m, int64_t f, int64_t n, const float* g, const float* u,
                      const float* bias_g, const float* bias_u) {
  const Experts& w = *p.w;
  using Elem = typename L::Elem;
  Elem* act = reinterpret_cast<Elem*>(block.act + m * row_lanes<L>(w.F) * 4) + f;
  XT* h = p.h ? static_cast<XT*>(p.h) + (block.row + m) * w.in_rows() + f * w.gate_step() : nullptr;
  for (int64_t i = 0; i < n; i += W) {
    const int64_t left = n - i;
    const vf gate = load_upto(g + i, left) + load_upto(bias_g + i, left);
    const vf up = w.act.gated ? load_upto(u + i, left) + load_upto(bias_u + i, left) : splat(0.0f);
    if (h) {
      if (w.gate_step() == 1) {
        store_upto(h + i, gate, left);
        if (w.act.gated) store_upto(h + w.up_shift() + i, up, left);
      } else {
        for (int64_t j = 0; j < least(W, left); ++j) {
          put(h + 2 * (i + j), gate[j]);
          put(h + 2 * (i + j) + 1, up[j]);
        }
      }
    }
    store_upto(act + i, hidden(w.act, gate, up), left);
  }
  if (f + n == w.F) {
    const int64_t padded = row_lanes<L>(w.F) * L::kPerLane;
    memset(act + n, 0, static_cast<size_t>(padded - w.F) * sizeof(Elem));
  }
}

// The product of a tile with up to kPanel weight rows: sums (rows, kPanel). `advance` is the distance in elements to the
// rows of the next panel, 0 when there is none that can be read where it lies.
template <class L, class WT>
static void product(int64_t rows, const float* tile, int64_t elems, const WT* const* weights, int64_t n, int64_t advance,
                    const Buffers& buf) {
  const int64_t stride = row_lanes<L>(elems);
  if (rows <= kDotLimit) {
    const int64_t quarter = (n + kStreams - 1) / kStreams;
    float out[kDotLimit * kStreams];
    for (int64_t i = 0; i < quarter; ++i) {
      const WT* r[kStreams];
      for (int s = 0; s < kStreams; ++s) {
        const int64_t j = s * quarter + i;
        r[s] = weights[j < n && weights[j] ? j : 0];
      }
      dot_rows<L, WT>(rows, tile, stride, r, elems, out);
      for (int s = 0; s < kStreams; ++s)
        if (s * quarter + i < n)
          for (int64_t m = 0; m < rows; ++m) buf.sums[m * kPanel + s * quarter + i] = out[m * kStreams + s];
    }
    return;
  }
  for (int64_t k = 0; k < elems; k += kLaneBlock * L::kPerLane) {
    const int64_t end = least(elems, k + kLaneBlock * L::kPerLane);
    pack_panel<L, WT>(weights, kVectors, k, end, buf.panel);
    Coming coming;
    if (advance != 0 && n == kPanel) {
      coming.row = reinterpret_cast<const char* const*>(weights);
      coming.shift = (end < elems ? end : advance) * static_cast<int64_t>(sizeof(WT));
      constexpr int kLines = kLaneBlock * L::kPerLane * static_cast<int>(sizeof(WT)) / 64;
      coming.log_lines = __builtin_ctz(kLines);
      coming.left = kPanel * kLines;
    }
    panel_product<L, kVectors>(rows, tile + k / L::kPerLane, stride, buf.panel, lanes_of<L>(end - k), buf.sums, kPanel,
                               k == 0, coming);
  }
}

template <class L, class WT>
static const WT* weight_row(const Array& w, int64_t expert, int64_t row, int64_t elems, WT* copy) {
  const WT* p = static_cast<const WT*>(w.at(expert, row));
  if (w.s2 == 1) return p;
  copy_rows(p, w.s1, w.s2, 1, elems, copy);
  return copy;
}

template <class L, class WT>
static void up_task(const Part& p, const Block& block, int64_t f0, int64_t f1, Local& local) {
  const Experts& w = *p.w;
  const Buffers buf = carve<L>(local.data, block.rows, w.D, w.F, sizeof(WT), w.w_in.s2 != 1 || w.w_out.s2 != 1, nullptr);
  if (local.tile_of != &block) {
    gather<L>(p, block, buf);
    local.tile_of = &block;
  }
  const int64_t span = w.act.gated ? kPanel / 2 : kPanel;  // hidden units in a panel
  for (int64_t f = f0; f < f1; f += span) {
    const int64_t n = least(span, f1 - f);
    const WT* rows[kPanel] = {};
    WT* copies = static_cast<WT*>(buf.copies);
    // Gates fill the first `half` columns, ups the next: with few columns they still lie next to each other.
    const int64_t half = block.rows <= kDotLimit ? n : span;
    for (int64_t i = 0; i < n; ++i) {
      rows[i] = weight_row<L, WT>(w.w_in, block.expert, (f + i) * w.gate_step(), w.D, copies + i * w.D);
      if (w.act.gated)
        rows[half + i] = weight_row<L, WT>(w.w_in, block.expert, (f + i) * w.gate_step() + w.up_shift(), w.D,
                                           copies + (half + i) * w.D);
    }
    product<L, WT>(block.rows, buf.tile, w.D, rows, w.act.gated ? half + n : n,
                   w.w_in.s2 == 1 && f + span < f1 ? span * w.gate_step() * w.w_in.s1 : 0, buf);
    fetch_bias(w.b_in, block.expert, f * w.gate_step(), w.gate_step(), n, buf.bias);
    if (w.act.gated)
      fetch_bias(w.b_in, block.expert, f * w.gate_step() + w.up_shift(), w.gate_step(), n, buf.bias + span);
    with_type(p.x.data, p.x.dtype, [&](auto* x) {
      using XT = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
      for (int64_t m = 0; m < block.rows; ++m)
        finish_up<L, XT>(p, block, m, f, n, buf.sums + m * kPanel, buf.sums + m * kPanel + half, buf.bias, buf.bias + span);
    });
  }
}

template <class L, class WT>
static void down_task(const Part& p, const Block& block, int64_t d0, int64_t d1, Local& local) {
  const Experts& w = *p.w;
  const Buffers buf = carve<L>(local.data, block.rows, w.D, w.F, sizeof(WT), w.w_in.s2 != 1 || w.w_out.s2 != 1, nullptr);
  for (int64_t d = d0; d < d1; d += kPanel) {
    const int64_t n = least(kPanel, d1 - d);
    const WT* rows[kPanel] = {};
    for (int64_t i = 0; i < n; ++i)
      rows[i] = weight_row<L, WT>(w.w_out, block.expert, d + i, w.F, static_cast<WT*>(buf.copies) + i * w.F);
    product<L, WT>(block.rows, reinterpret_cast<const float*>(block.act), w.F, rows, n,
                   w.w_out.s2 == 1 && d + kPanel < d1 ? kPanel * w.w_out.s1 : 0, buf);
    fetch_bias(w.b_out, block.expert, d, 1, n, buf.bias);
    with_type(p.out, p.x.dtype, [&](auto* x) {
      using XT = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
      for (int64_t m = 0; m < block.rows; ++m) {
        const int64_t slot = p.plan.slot_of_row ? p.plan.slot_of_row[block.row + m] : block.row + m;
        XT* out = reinterpret_cast<XT*>(p.out) + (slot - p.first_slot) * w.D + d;
        const float scale = p.out_scale ? p.out_scale[slot] : 1.0f;
        for (int64_t i = 0; i < n; i += W) {
          const vf v = load_upto(buf.sums + m * kPanel + i, n - i) + load_upto(buf.bias + i, n - i);
          store_upto(out + i, v * scale, n - i);
        }
      }
    });
  }
}

static void combine_task(const Sum& s, int64_t t0, int64_t t1) {
  with_type(s.y, s.dtype, [&](auto* y0) {
    using XT = std::remove_const_t<std::remove_pointer_t<decltype(y0)>>;
    for (int64_t t = t0; t < t1; ++t) {
      XT* y = reinterpret_cast<XT*>(s.y) + t * s.D;
      const XT* out = reinterpret_cast<const XT*>(s.out) + (t - s.first_token) * s.K * s.D;
      const XT* shared = s.shared ? reinterpret_cast<const XT*>(s.shared) + (t - s.first_token) * s.D : nullptr;
      auto dropped = [&](int64_t k) {
        const int64_t row = s.row_of_slot ? s.row_of_slot[t * s.K + k] : t * s.K + k;
        return row < 0 || row >= s.rows;
      };
      if (s.only_dropped) {
        if (dropped(0)) memset(y, 0, static_cast<size_t>(s.D) * sizeof(XT));
        continue;
      }
      for (int64_t d = 0; d < s.D; d += W) {
        const int64_t left = s.D - d;
        vf total = splat(0.0f);
        for (int64_t k = 0; k < s.K; ++k) {
          if (dropped(k)) continue;
          const vf v = load_upto(out + k * s.D + d, left);
          total = s.weights ? fma(splat(s.weights[t * s.K + k]), v, total) : total + v;
        }
        if (shared) {
          const vf v = load_upto(shared + d, left);
          total = s.shared_gate ? fma(splat(s.shared_gate[t]), v, total) : total + v;
        }
        store_upto(y + d, total, left);
      }
    }
  });
}

template <class L>
static int64_t act_bytes(const Part& p, int64_t rows) {
  return rows * row_lanes<L>(p.w->F) * 4;
}
template <class L>
static int64_t max_rows(const Part& p) {
  const int64_t n = kTileBytes / (row_lanes<L>(p.w->D) * 4);
  return n < kDotLimit ? kDotLimit : least(n, 512);
}
template <class L>
static size_t local_bytes(const Part& p, int64_t rows) {
  size_t used = 0;
  carve<L>(nullptr, rows, p.w->D, p.w->F, size_of(p.w->w_in.dtype), p.w->w_in.s2 != 1 || p.w->w_out.s2 != 1, &used);
  return used;
}

template <class L, class WT>
static const Kernels* table(const char* name) {
  static const Kernels k = {act_bytes<L>,     max_rows<L>,  local_bytes<L>, up_task<L, WT>,
                            down_task<L, WT>, combine_task, kPanel,         name};
  return &k;
}

static const Kernels* float_table(DType w, const char* name) {
  if (w == DType::f32) return table<FloatLane, float>(name);
  if (w == DType::bf16) return table<FloatLane, bf16>(name);
  return table<FloatLane, f16>(name);
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
