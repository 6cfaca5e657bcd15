// Activations on vectors. Included after vec.h, in the same namespace.
//
// exp, erfc and tanh are polynomials fitted in float64 for this file; relative errors stay below 3e-7 (two ulp), which
// the error budget of fp32 does not notice. NaN stays NaN.

namespace moeffn {
namespace MOEFFN_NS {

// exp(x) for x clamped to [-87, 88]: 2^n * 2^f with f in [-1/2, 1/2], degree 6 (2e-9 before rounding).
MOEFFN_INLINE vf vexp(vf x) {
  x = vmax(vmin(x, splat(88.0f)), splat(-87.0f));
  const vf shifted = fma(x, splat(1.44269504088896f), splat(12582912.0f));  // 1.5 * 2^23: rounds to an integer
  const vf n = shifted - 12582912.0f;
  vf f = fma(n, splat(-0.693145751953125f), x);  // x - n ln2 in two steps
  f = fma(n, splat(-1.42860677e-6f), f) * 1.44269504088896f;
  vf p = splat(0.00015346011418984726f);
  p = fma(p, f, splat(0.0013399913628735214f));
  p = fma(p, f, splat(0.009618487954015507f));
  p = fma(p, f, splat(0.055503288229286914f));
  p = fma(p, f, splat(0.24022646902847156f));
  p = fma(p, f, splat(0.69314720571516f));
  p = fma(p, f, splat(1.0f));
  return as_float(as_bits(p) + (as_bits(shifted) << 23));
}

MOEFFN_INLINE vf vsigmoid(vf x) { return 1.0f / (1.0f + vexp(-x)); }

MOEFFN_INLINE vf vtanh(vf x) {
  const vf a = vmax(x, -x);
  const vf e = vexp(-2.0f * a);
  const vf big = (1.0f - e) / (1.0f + e);
  const vf s = x * x;
  vf p = splat(0.021869488f);  // Taylor, for |x| < 0.3, where 1 - e cancels
  p = fma(p, s, splat(-0.053968254f));
  p = fma(p, s, splat(0.133333333f));
  p = fma(p, s, splat(-0.333333333f));
  const vf small = fma(p * s, a, a);
  const vf r = select(a < 0.3f, small, big);
  return select(x != x, x, select(x < 0.0f, -r, r));
}

// The normal distribution function: erfc(|x|/sqrt2)/2 or one minus it. erfc(z) = exp(-z²) t p(t), t = 1/(1 + 0.4 z).
MOEFFN_INLINE vf vnormal_cdf(vf x) {
  const vf z = vmin(vmax(x, -x) * 0.70710678118654752f, splat(9.3f));
  const vf t = 1.0f / fma(z, splat(0.4f), splat(1.0f));
  vf p = splat(0.027566276490688324f);
  p = fma(p, t, splat(-0.07063945382833481f));
  p = fma(p, t, splat(-0.06769797950983047f));
  p = fma(p, t, splat(0.2720891535282135f));
  p = fma(p, t, splat(-0.056345511227846146f));
  p = fma(p, t, splat(0.2560376822948456f));
  p = fma(p, t, splat(0.18437522649765015f));
  p = fma(p, t, splat(0.22915929555892944f));
  p = fma(p, t, splat(0.22545534372329712f));
  const vf tail = 0.5f * vexp(-z * z) * t * p;
  // Near zero the two halves of erfc would each bring a rounding: a polynomial in x² there (2e-9, degree 5 in x²).
  const vf s = x * x;
  vf q = splat(-7.323495083255693e-06f);
  q = fma(q, s, splat(0.00011265689681749791f));
  q = fma(q, s, splat(-0.0011856068158522248f));
  q = fma(q, s, splat(0.009973068721592426f));
  q = fma(q, s, splat(-0.06649032980203629f));
  q = fma(q, s, splat(0.3989422917366028f));
  return select(s < 1.21f, fma(q, x, splat(0.5f)), select(x < 0.0f, tail, 1.0f - tail));
}

// act(g), before any gating.
MOEFFN_INLINE vf activate(const Activation& a, vf g) {
  switch (a.kind) {
    case Kind::silu: {
      const vf s = vsigmoid(a.alpha * g);
      return (a.softcap_gate > 0 ? a.softcap_gate * vtanh(g / a.softcap_gate) : g) * s;
    }
    case Kind::gelu: return g * vnormal_cdf(g);
    case Kind::gelu_tanh: {
      const vf inner = fma(g * g * g, splat(0.044715f), g) * 0.7978845608028654f;
      return g * vsigmoid(2.0f * inner);
    }
    case Kind::relu: return select(g < 0.0f, splat(0.0f), g);
    case Kind::relu2: {
      const vf r = select(g < 0.0f, splat(0.0f), g);
      return r * r;
    }
    case Kind::sigmoid: return select(g != g, g, vsigmoid(g));
    default: return g;
  }
}

// What an expert's hidden unit gives, from its gate value and (gated kinds) its up value.
MOEFFN_INLINE vf hidden(const Activation& a, vf g, vf u) {
  const vf limit = splat(a.limit);
  if (a.has_limit && !a.limit_after) g = select(g > limit, limit, g);
  vf r = activate(a, g);
  if (a.has_limit && a.limit_after) r = select(r > limit, limit, r);
  if (!a.gated) return r;
  if (a.has_limit) {
    u = select(u > limit, limit, u);
    u = select(u < -limit, -limit, u);
  }
  if (a.softcap_up > 0) u = a.softcap_up * vtanh(u / a.softcap_up);
  return r * (u + a.up_offset);
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
