// The activation's backward, for one instruction set. Included after vec.h and act.h, in their namespace.

namespace moeffn {
namespace MOEFFN_NS {

struct Slope {
  vf value, slope;
};

// act(g) and its derivative.
MOEFFN_INLINE Slope activate_slope(const Activation& a, vf g) {
  const vf zero = splat(0.0f), one = splat(1.0f);
  switch (a.kind) {
    case Kind::silu: {
      const vf s = vsigmoid(a.alpha * g);
      if (a.softcap_gate > 0) {
        const vf t = vtanh(g / a.softcap_gate), capped = a.softcap_gate * t;
        return {capped * s, s * ((1.0f - t * t) + capped * (1.0f - s))};
      }
      const vf y = g * s;
      return {y, fma(a.alpha * y, 1.0f - s, s)};
    }
    case Kind::gelu: {
      const vf cdf = vnormal_cdf(g);
      return {g * cdf, fma(g * 0.3989422804014327f, vexp(-0.5f * g * g), cdf)};
    }
    case Kind::gelu_tanh: {
      constexpr float c = 2.0f * 0.7978845608028654f;
      const vf s = vsigmoid(c * fma(g * g * g, splat(0.044715f), g)), y = g * s;
      return {y, fma(y * (1.0f - s), c * fma(g * g, splat(3 * 0.044715f), one), s)};
    }
    case Kind::relu: return {select(g < 0.0f, zero, g), select(g > 0.0f, one, zero)};
    case Kind::relu2: {
      const vf r = select(g < 0.0f, zero, g);
      return {r * r, 2.0f * r};
    }
    case Kind::sigmoid: {
      const vf s = select(g != g, g, vsigmoid(g));
      return {s, s * (1.0f - s)};
    }
    default: return {g, one};
  }
}

struct Hidden {
  vf value, d_gate, d_up;
};

// act(g) * (u + up_offset) and its two derivatives. A clamp passes the gradient on its bounds, none beyond.
MOEFFN_INLINE Hidden hidden_slope(const Activation& a, vf g, vf u) {
  const vf zero = splat(0.0f), limit = splat(a.limit);
  const bool before = a.has_limit && !a.limit_after;
  Slope s = activate_slope(a, before ? select(g > limit, limit, g) : g);
  if (before) s.slope = select(g > limit, zero, s.slope);
  if (a.has_limit && a.limit_after) {
    s.slope = select(s.value > limit, zero, s.slope);
    s.value = select(s.value > limit, limit, s.value);
  }
  if (!a.gated) return {s.value, s.slope, zero};
  vf up = u, d_up = s.value;
  if (a.has_limit) {
    up = select(u > limit, limit, select(u < -limit, -limit, u));
    d_up = select(up != u, u - u, d_up);  // zero beyond the limits, NaN for NaN
  }
  if (a.softcap_up > 0) {
    const vf t = vtanh(u / a.softcap_up);
    up = a.softcap_up * t;
    d_up = d_up * (1.0f - t * t);
  }
  up = up + a.up_offset;
  return {s.value * up, s.slope * up, d_up};
}

// Splits 2W alternating values.
template <class E>
MOEFFN_INLINE void load_pairs(const E* p, int64_t n, vf& even, vf& odd) {
  float t[2 * W], a[W], b[W];
  store(t, load_upto(p, 2 * n));
  store(t + W, 2 * n > W ? load_upto(p + W, 2 * n - W) : vf{});
  for (int i = 0; i < W; ++i) {
    a[i] = t[2 * i];
    b[i] = t[2 * i + 1];
  }
  even = load(a);
  odd = load(b);
}
template <class E>
MOEFFN_INLINE void store_pairs(E* p, int64_t n, vf even, vf odd) {
  float t[2 * W], a[W], b[W];
  store(a, even);
  store(b, odd);
  for (int i = 0; i < W; ++i) {
    t[2 * i] = a[i];
    t[2 * i + 1] = b[i];
  }
  store_upto(p, load(t), 2 * n);
  if (2 * n > W) store_upto(p + W, load(t + W), 2 * n - W);
}

template <class L, class E>
static float act_row_of(const ActRow& r, int64_t n) {
  using Elem = typename L::Elem;
  const Activation act = *r.act;
  const E *gate = reinterpret_cast<const E*>(r.gate), *up = reinterpret_cast<const E*>(r.up);
  Elem *d_gate = reinterpret_cast<Elem*>(r.d_gate), *d_up = reinterpret_cast<Elem*>(r.d_up);
  Elem* scaled = reinterpret_cast<Elem*>(r.scaled);
  const vf scale = splat(r.scale);
  const bool pairs = act.gated && r.interleaved;
  vf dot = splat(0.0f);
  for (int64_t k = 0; k < n; k += W) {
    const int64_t left = n - k;
    vf g, u = splat(0.0f);
    if (pairs) {
      load_pairs(gate + 2 * k, left, g, u);
    } else {
      g = load_upto(gate + k, left);
      if (act.gated) u = load_upto(up + k, left);
    }
    const Hidden h = hidden_slope(act, g, u);
    if (scaled) store_upto(scaled + k, scale * h.value, left);
    if (!r.da) continue;
    const vf da = load_upto(r.da + k, left);
    dot = fma(da, h.value, dot);
    if (!d_gate) continue;
    const vf d = scale * da;
    if (pairs) {
      store_pairs(d_gate + 2 * k, left, d * h.d_gate, d * h.d_up);
    } else {
      store_upto(d_gate + k, d * h.d_gate, left);
      if (act.gated) store_upto(d_up + k, d * h.d_up, left);
    }
  }
  return sum(dot);
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
