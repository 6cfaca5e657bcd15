// The tasks of the forward pass for one instruction set, over any dtypes. Included after finish.h.
//
// up:   gather rows of x into a tile, multiply by a range of w_in's rows, bias, activation -> act (a tile itself)
// down: act · a range of w_out's rows, bias -> out

namespace moeffn {
namespace MOEFFN_NS {

// n rows from element `first`, `lanes` lanes of each, in the kernels' dtype with zeros past their `elems` elements.
template <class L, class WT>
static Strip widen(Strip from, int64_t n, int64_t first, int64_t lanes, int64_t elems, float* to) {
  const int64_t stride = lanes + W, take = least(lanes * L::kPerLane, elems - first);
  for (int64_t i = 0; i < n; ++i) {
    const WT* row = reinterpret_cast<const WT*>(from.data + i * from.stride) + first;
    auto* wide = reinterpret_cast<typename L::Elem*>(to + i * stride);
    for (int64_t k = 0; k < take; k += W) store_upto(wide + k, load_upto(row + k, take - k), take - k);
    for (int64_t k = take; k < lanes * L::kPerLane; ++k) put(wide + k, 0.0f);
  }
  return {reinterpret_cast<const char*>(to), stride * 4};
}

// sums (dots, total; rows `pitch` apart) = the tile's dot rows · the `total` rows of one strip of n, or of two, in S streams of
// neighbouring rows.
template <class L, class WT, int S>
static void dot_streams(const Cut& cut, const float* tile, int64_t elems, const Strip* strips, int64_t total, int64_t n,
                        float* sums, int64_t pitch) {
  const int64_t each = (total + S - 1) / S;
  float out[kDotLimit * S];
  for (int64_t i = 0; i < each; ++i) {
    const WT* r[S];
    for (int s = 0; s < S; ++s) {
      const int64_t j = s * each + i < total ? s * each + i : 0;
      const Strip& strip = strips[j >= n];
      r[s] = reinterpret_cast<const WT*>(strip.data + (j >= n ? j - n : j) * strip.stride);
    }
    dot_rows<L, WT, S>(cut.dots, tile + dots_at<L>(cut, elems), row_lanes<L>(elems), r, elems, out);
    for (int s = 0; s < S; ++s)
      if (s * each + i < total)
        for (int64_t m = 0; m < cut.dots; ++m) sums[m * pitch + s * each + i] = out[m * S + s];
  }
}
template <class L, class WT>
static void dots(const Cut& cut, const float* tile, int64_t elems, const Strip* strips, int64_t total, int64_t n, float* sums,
                 int64_t pitch) {
  if (cut.dots <= most_rows(kMoreStreams))
    dot_streams<L, WT, kMoreStreams>(cut, tile, elems, strips, total, n, sums, pitch);
  else if (cut.dots <= most_rows(kSomeStreams))
    dot_streams<L, WT, kSomeStreams>(cut, tile, elems, strips, total, n, sums, pitch);
  else
    dot_streams<L, WT, kStreams>(cut, tile, elems, strips, total, n, sums, pitch);
}

// The products of a tile with `count` strips of n weight rows each: sums.
template <class L, class WT>
static void product(const Cut& cut, const float* tile, int64_t elems, const Strip* strips, int count, int64_t n,
                    const Buffers& buf) {
  const int64_t lanes = lanes_of<L>(elems), widest = cut.panels ? (cut.vectors + cut.panels - 1) / cut.panels : 1;
  const bool in_place = direct<L, WT>(elems);
  const int64_t step = in_place ? kPanelBytes / (widest * W * 4) : kWideLanes;
  for (int64_t k = 0; cut.panels && k < lanes; k += step) {
    const int64_t some = least(step, lanes - k);
    for (int s = 0; s < count; ++s) {
      const Strip w = in_place ? Strip{strips[s].data + k * 4, strips[s].stride}
                               : widen<L, WT>(strips[s], n, k * L::kPerLane, some, elems, buf.wide);
      for (int64_t p = 0; p < cut.panels; ++p) {
        const int64_t first = cut.first(p) * W;
        with_vectors(cut.first(p + 1) - cut.first(p), [&](auto vectors) {
          constexpr int V = decltype(vectors)::value;
          strip_product<L, V>(n, w, tile + first * lanes + k * V * W, some, buf.sums + first * kChunk + s * n * V * W, k == 0);
        });
      }
    }
  }
  if (cut.dots) dots<L, WT>(cut, tile, elems, strips, n * count, n, buf.sums + cut.vectors * W * kChunk, kChunk);
}

// n weight rows of one expert from `first`; copied when their elements do not lie side by side.
template <class WT>
static Strip strip(const Array& w, int64_t expert, int64_t first, int64_t n, int64_t elems, WT* copies) {
  const WT* from = static_cast<const WT*>(w.at(expert, first));
  const int64_t size = static_cast<int64_t>(sizeof(WT));
  if (w.s2 == 1) return {reinterpret_cast<const char*>(from), w.s1 * size};
  copy_rows(from, w.s1, w.s2, n, elems, copies);
  return {reinterpret_cast<const char*>(copies), elems * size};
}

// The strips of hidden units [f, f + n): gates, and ups when gated.
template <class WT>
static void up_strips(const Experts& w, int64_t expert, int64_t f, int64_t n, WT* copies, Strip* out) {
  if (w.gate_step() == 2) {  // gates and ups lie side by side: one copy of both
    const Strip both = strip(w.w_in, expert, 2 * f, 2 * n, w.D, copies);
    for (int s = 0; s < 2; ++s) out[s] = {both.data + s * both.stride, 2 * both.stride};
    return;
  }
  out[0] = strip(w.w_in, expert, f, n, w.D, copies);
  if (w.act.gated) out[1] = strip(w.w_in, expert, w.F + f, n, w.D, copies + n * w.D);
}

template <class L, class WT>
static void up_task(const Part& p, const Block& block, int64_t f0, int64_t f1, Local& local) {
  const Experts& w = *p.w;
  const Cut cut = cut_rows(block.rows);
  const Buffers buf = carve<L, WT>(local.data, cut, w, nullptr);
  if (local.tile_of != &block) {
    gather<L>(p, block, cut, buf);
    local.tile_of = &block;
  }
  const int64_t count = w.act.gated ? 2 : 1, span = kChunk / count, step = w.gate_step();  // span: hidden units at a time
  const int64_t lanes = lanes_of<L>(w.F), stride = row_lanes<L>(w.F);
  float* act = reinterpret_cast<float*>(block.act);
  const bool columns = by_columns(cut, w.w_in), at_once = dots_at_once(cut, w.w_in);
  const int64_t side = step == 2 ? 2 : 1, all = f1 - f0;  // columns of a unit that lie side by side
  if (at_once) {
    Strip strips[2];
    up_strips<WT>(w, block.expert, f0, all, nullptr, strips);
    dots<L, WT>(cut, buf.tile, w.D, strips, count * all, all, buf.wide_sums, count * all);
  }
  if (columns)
    for (int64_t s = 0; s < count; s += side)
      column_product<L>(cut.dots, buf.tile, w.D, static_cast<const WT*>(w.w_in.at(block.expert, s * w.F + f0 * side)),
                        w.w_in.s2, all * side, buf.wide_sums + s * cut.dots * all);
  for (int64_t f = f0; f < f1; f += span) {
    const int64_t n = least(span, f1 - f);
    if (columns) {
      for (int64_t m = 0; m < cut.dots; ++m)
        for (int64_t s = 0; s < count; ++s)
          for (int64_t i = 0; i < n; ++i)
            buf.sums[m * kChunk + s * n + i] =
                side == 2 ? buf.wide_sums[(m * all + f - f0 + i) * 2 + s]
                          : buf.wide_sums[(s * cut.dots + m) * all + f - f0 + i];
    } else if (!at_once) {
      Strip strips[2];
      up_strips(w, block.expert, f, n, static_cast<WT*>(buf.copies), strips);
      product<L, WT>(cut, buf.tile, w.D, strips, static_cast<int>(count), n, buf);
    }
    fetch_bias(w.b_in, block.expert, f * step, step, n, buf.bias);
    if (w.act.gated) fetch_bias(w.b_in, block.expert, f * step + w.up_shift(), step, n, buf.bias + n);
    with_type(p.x.data, p.x.dtype, [&](auto* x) {
      using XT = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
      for (int64_t i = 0; i < cut.panels; ++i)
        for (int64_t first = cut.first(i), pitch = (cut.first(i + 1) - first) * W, at = 0; at < pitch; at += W) {
          float* gate = buf.sums + first * W * kChunk + at;
          const int64_t m = first * W + at;
          finish_up<L, XT>(p, block.row + m, least(W, block.rows - m), f, n, gate, gate + n * pitch, pitch, buf.bias,
                           buf.bias + n, act + first * W * lanes + f / L::kPerLane * pitch + at);
        }
      for (int64_t m = 0; m < cut.dots; ++m) {
        const float* gate = at_once ? buf.wide_sums + m * count * all + f - f0 : buf.sums + (cut.vectors * W + m) * kChunk;
        finish_up_row<L, XT>(p, block.row + cut.vectors * W + m, f, n, gate, gate + (at_once ? all : n), buf.bias,
                             act + dots_at<L>(cut, w.F) + m * stride);
      }
    });
  }
}

template <class L, class WT>
static void down_task(const Part& p, const Block& block, int64_t d0, int64_t d1, Local& local) {
  const Experts& w = *p.w;
  const Cut cut = cut_rows(block.rows);
  const Buffers buf = carve<L, WT>(local.data, cut, w, nullptr);
  const float* act = reinterpret_cast<const float*>(block.act);
  const bool columns = by_columns(cut, w.w_out), at_once = dots_at_once(cut, w.w_out);
  if (at_once) {
    const Strip rows = strip<WT>(w.w_out, block.expert, d0, d1 - d0, w.F, nullptr);
    dots<L, WT>(cut, act, w.F, &rows, d1 - d0, d1 - d0, buf.wide_sums, d1 - d0);
  }
  if (columns)
    column_product<L>(cut.dots, act, w.F, static_cast<const WT*>(w.w_out.at(block.expert, d0)), w.w_out.s2, d1 - d0,
                      buf.wide_sums);
  for (int64_t d = d0; d < d1; d += kChunk) {
    const int64_t n = least(kChunk, d1 - d);
    if (!columns && !at_once) {
      const Strip rows = strip(w.w_out, block.expert, d, n, w.F, static_cast<WT*>(buf.copies));
      product<L, WT>(cut, act, w.F, &rows, 1, n, buf);
    }
    fetch_bias(w.b_out, block.expert, d, 1, n, buf.bias);
    with_type(p.out.data, p.x.dtype, [&](auto* x) {
      using XT = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
      for (int64_t i = 0; i < cut.panels; ++i)
        for (int64_t first = cut.first(i), pitch = (cut.first(i + 1) - first) * W, at = 0; at < pitch; at += W) {
          const int64_t m = first * W + at;
          finish_out<XT>(p, block.row + m, least(W, block.rows - m), d, n, buf.sums + first * W * kChunk + at, pitch, buf.bias);
        }
      for (int64_t m = 0; m < cut.dots; ++m) {
        const float* sums = columns || at_once ? buf.wide_sums + m * (d1 - d0) + d - d0
                                               : buf.sums + (cut.vectors * W + m) * kChunk;
        const int64_t slot = slot_of(p, block.row + cut.vectors * W + m);
        XT* out = p.out.at<XT>(slot, d);
        const float scale = p.out_scale ? p.out_scale[slot] : 1.0f;
        for (int64_t i = 0; i < n; i += W)
          store_upto(out + i, (load_upto(sums + i, n - i) + load_upto(buf.bias + i, n - i)) * scale, n - i);
      }
    });
  }
}

static void combine_task(const Sum& s, int64_t t0, int64_t t1, int64_t d0, int64_t d1) {
  with_type(s.y, s.dtype, [&](auto* y0) {
    using XT = std::remove_const_t<std::remove_pointer_t<decltype(y0)>>;
    for (int64_t t = t0; t < t1; ++t) {
      XT* y = reinterpret_cast<XT*>(s.y) + t * s.D + d0;
      auto dropped = [&](int64_t k) {
        const int64_t row = s.row_of_slot ? s.row_of_slot[t * s.K + k] : t * s.K + k;
        return row < 0 || row >= s.rows;
      };
      if (s.only_dropped) {
        if (dropped(0)) memset(y, 0, static_cast<size_t>(d1 - d0) * sizeof(XT));
        continue;
      }
      const XT* out = s.out.at<XT>(t * s.K, d0);
      const XT* shared = s.shared.data ? s.shared.at<XT>(t, d0) : nullptr;
      for (int64_t d = 0; d < d1 - d0; d += W) {
        const int64_t left = d1 - d0 - d;
        vf total = splat(0.0f);
        for (int64_t k = 0; k < s.K; ++k) {
          if (dropped(k)) continue;
          const vf v = load_upto(out + k * s.out.width + d, left);
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
  return tile_floats<L>(cut_rows(rows), p.w->F) * 4;
}
template <class L>
static int64_t max_rows(const Part& p) {
  const int64_t n = kTileBytes / (row_lanes<L>(p.w->D) * 4);
  return n < kDotLimit ? kDotLimit : least(n, 512);
}
template <class L, class WT>
static size_t local_bytes(const Part& p, int64_t rows) {
  size_t used = 0;
  carve<L, WT>(nullptr, cut_rows(rows), *p.w, &used);
  return used;
}

template <class L, class WT>
static const Kernels* table(const char* name) {
  static const Kernels k = {act_bytes<L>,     max_rows<L>,  local_bytes<L, WT>, up_task<L, WT>,
                            down_task<L, WT>, combine_task, name,
                            logits_task<WT>};
  return &k;
}

static const Kernels* float_table(DType w, const char* name) {
  if (w == DType::f32) return table<FloatLane, float>(name);
  if (w == DType::bf16) return table<FloatLane, bf16>(name);
  return table<FloatLane, f16>(name);
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
