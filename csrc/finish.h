// What follows a product: bias, activation and routing weight in registers, and the sums turned from (weight rows x tokens)
// to rows of tokens where those are wanted. Included after tile.h and act.h.

namespace moeffn {
namespace MOEFFN_NS {

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

// Up to W tokens' sums (n rows of W tokens, `pitch` floats apart) turned: writes n elements to to(m) for each token m.
template <class To>
static void write_columns(const float* sums, int64_t pitch, int64_t tokens, int64_t n, const To& to) {
  for (int64_t i0 = 0; i0 < n; i0 += W) {
    vf t[W];
    for (int64_t i = 0; i < W; ++i) t[i] = i0 + i < n ? load(sums + (i0 + i) * pitch) : splat(0.0f);
    transpose(t);
    for (int64_t m = 0; m < tokens; ++m) to(m, i0, t[m], n - i0);
  }
}

// Pre-activations of up to W tokens from `row`, hidden units [f, f + n), to h.
template <class XT>
static void save_h(const Part& p, int64_t row, int64_t tokens, int64_t f, int64_t n, const float* gate, const float* up,
                   int64_t pitch) {
  const Experts& w = *p.w;
  XT* h = static_cast<XT*>(p.h) + row * w.in_rows() + f * w.gate_step();
  if (w.gate_step() == 1) {
    auto to = [&](XT* first) {
      return [=](int64_t m, int64_t i, vf v, int64_t left) { store_upto(first + m * w.in_rows() + i, v, left); };
    };
    write_columns(gate, pitch, tokens, n, to(h));
    if (w.act.gated) write_columns(up, pitch, tokens, n, to(h + w.up_shift()));
    return;
  }
  for (int64_t m = 0; m < tokens; ++m)
    for (int64_t i = 0; i < n; ++i) {
      put(h + m * w.in_rows() + 2 * i, gate[i * pitch + m]);
      put(h + m * w.in_rows() + 2 * i + 1, up[i * pitch + m]);
    }
}

// Sums (n rows of up to W tokens) of hidden units [f, f + n) -> h, and act in a panel whose lane of f is at `act`.
template <class L, class XT>
static void finish_up(const Part& p, int64_t row, int64_t tokens, int64_t f, int64_t n, float* gate, float* up,
                      int64_t pitch, const float* bias_g, const float* bias_u, float* act) {
  const Experts& w = *p.w;
  if (w.b_in.data || p.h) {
    for (int64_t i = 0; i < n; ++i) {
      store(gate + i * pitch, load(gate + i * pitch) + bias_g[i]);
      if (w.act.gated) store(up + i * pitch, load(up + i * pitch) + bias_u[i]);
    }
    if (p.h) save_h<XT>(p, row, tokens, f, n, gate, up, pitch);
  }
  for (int64_t i = 0; i < n; i += L::kPerLane) {
    vf v[L::kPerLane];
    for (int64_t j = 0; j < L::kPerLane; ++j) {
      const int64_t at = (i + j) * pitch;
      v[j] = i + j < n ? hidden(w.act, load(gate + at), w.act.gated ? load(up + at) : splat(0.0f)) : splat(0.0f);
    }
    store(act + i / L::kPerLane * pitch, L::join(v));
  }
}

// One row of sums (gate values g, up values u) of hidden units [f, f + n) -> h, and act in a row of the tile.
template <class L, class XT>
static void finish_up_row(const Part& p, int64_t row, int64_t f, int64_t n, const float* g, const float* u,
                          const float* bias, float* act_row) {
  const Experts& w = *p.w;
  using Elem = typename L::Elem;
  Elem* act = reinterpret_cast<Elem*>(act_row) + f;
  XT* h = p.h ? static_cast<XT*>(p.h) + row * w.in_rows() + f * w.gate_step() : nullptr;
  for (int64_t i = 0; i < n; i += W) {
    const int64_t left = n - i;
    const vf gate = load_upto(g + i, left) + load_upto(bias + i, left);
    const vf up = w.act.gated ? load_upto(u + i, left) + load_upto(bias + n + i, left) : splat(0.0f);
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

// Sums (n rows of up to W tokens) of columns [d, d + n) -> out.
template <class XT>
static void finish_out(const Part& p, int64_t row, int64_t tokens, int64_t d, int64_t n, const float* sums, int64_t pitch,
                       const float* bias) {
  XT* out = p.out.at<XT>(p.out.first, d);
  write_columns(sums, pitch, tokens, n, [&](int64_t m, int64_t i, vf v, int64_t left) {
    const int64_t slot = slot_of(p, row + m);
    const float scale = p.out_scale ? p.out_scale[slot] : 1.0f;
    store_upto(out + (slot - p.out.first) * p.out.width + i, (v + load_upto(bias + i, left)) * scale, left);
  });
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
