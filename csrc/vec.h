// Vectors of MOEFFN_WIDTH floats, for one instruction set: the file that includes this sets MOEFFN_WIDTH and MOEFFN_NS.
// Everything is static in that namespace, so that no function compiled for one set is ever linked into another.
#include <cstdint>
#include <cstring>

#include "problem.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace moeffn {
namespace MOEFFN_NS {

constexpr int W = MOEFFN_WIDTH;
typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

#define MOEFFN_INLINE static inline __attribute__((always_inline))

MOEFFN_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
MOEFFN_INLINE int64_t round_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

MOEFFN_INLINE vf splat(float x) {
#if MOEFFN_WIDTH == 16
  return (vf)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (vf)_mm256_set1_ps(x);
#else
  return vf{x, x, x, x};  // not vf{} + x: that is an addition, since -0 + 0 is not -0
#endif
}
MOEFFN_INLINE vf as_float(vu v) {
  vf r;
  memcpy(&r, &v, sizeof r);
  return r;
}
MOEFFN_INLINE vu as_bits(vf v) {
  vu r;
  memcpy(&r, &v, sizeof r);
  return r;
}
MOEFFN_INLINE vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
MOEFFN_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
MOEFFN_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
MOEFFN_INLINE vf fma(vf a, vf b, vf c) {
#if MOEFFN_WIDTH == 16
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Halves to float and back, exact or rounded to nearest even; NaN stays NaN.
MOEFFN_INLINE float half_bits_to_float(uint16_t h) {
  const uint32_t w = static_cast<uint32_t>(h) << 16, twice = w + w;
  uint32_t bits = (twice >> 4) + (0xE0u << 23);
  float normal, tiny;
  memcpy(&normal, &bits, 4);
  normal *= 0x1.0p-112f;
  bits = (twice >> 17) | (126u << 23);
  memcpy(&tiny, &bits, 4);
  tiny -= 0.5f;
  float r = twice < (1u << 27) ? tiny : normal;
  memcpy(&bits, &r, 4);
  bits |= w & 0x80000000u;
  memcpy(&r, &bits, 4);
  return r;
}
MOEFFN_INLINE uint16_t float_to_half_bits(float f) {
  uint32_t w;
  memcpy(&w, &f, 4);
  const uint32_t sign = (w >> 16) & 0x8000u;
  w &= 0x7fffffffu;
  if (w > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (w >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (w < 0x38800000u) {                                               // subnormal: the addition rounds
    float a;
    memcpy(&a, &w, 4);
    a += 0.5f;
    uint32_t bits;
    memcpy(&bits, &a, 4);
    return static_cast<uint16_t>(sign | (bits - (126u << 23)));
  }
  w += 0xfffu + ((w >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((w - (112u << 23)) >> 13));
}
MOEFFN_INLINE uint16_t float_to_bf16_bits(float f) {
  uint32_t w;
  memcpy(&w, &f, 4);
  if ((w & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((w >> 16) | 0x40u);
  return static_cast<uint16_t>((w + 0x7fffu + ((w >> 16) & 1u)) >> 16);
}

MOEFFN_INLINE float get(const float* p) { return *p; }
MOEFFN_INLINE float get(const bf16* p) {
  const uint32_t w = static_cast<uint32_t>(p->bits) << 16;
  float r;
  memcpy(&r, &w, 4);
  return r;
}
MOEFFN_INLINE float get(const f16* p) { return half_bits_to_float(p->bits); }
MOEFFN_INLINE void put(float* p, float v) { *p = v; }
MOEFFN_INLINE void put(bf16* p, float v) { p->bits = float_to_bf16_bits(v); }
MOEFFN_INLINE void put(f16* p, float v) { p->bits = float_to_half_bits(v); }

MOEFFN_INLINE vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
MOEFFN_INLINE vf load(const bf16* p) {
#if MOEFFN_WIDTH == 16
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
#endif
  vh h;
  memcpy(&h, p, sizeof h);
  return as_float(__builtin_convertvector(h, vu) << 16);
}
MOEFFN_INLINE vf load(const f16* p) {
#if MOEFFN_WIDTH == 16
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vf v;
  for (int i = 0; i < W; ++i) v[i] = half_bits_to_float(p[i].bits);
  return v;
#endif
}
MOEFFN_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
MOEFFN_INLINE void store(bf16* p, vf v) {
  const vu w = as_bits(v);
  const vu even = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
  const vu quiet = (w >> 16) | 0x40u;
  const vi is_nan = v != v;
  const vu r = is_nan ? quiet : even;
  const vh h = __builtin_convertvector(r, vh);
  memcpy(p, &h, sizeof h);
}
MOEFFN_INLINE void store(f16* p, vf v) {
#if MOEFFN_WIDTH == 16
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < W; ++i) p[i].bits = float_to_half_bits(v[i]);
#endif
}
// The first n < W elements, zeros after; never touches p[n].
template <class E>
MOEFFN_INLINE vf load_part(const E* p, int64_t n) {
  E tmp[W];
  memset(tmp, 0, sizeof tmp);
  memcpy(tmp, p, static_cast<size_t>(n) * sizeof(E));
  return load(tmp);
}
template <class E>
MOEFFN_INLINE void store_part(E* p, vf v, int64_t n) {
  E tmp[W];
  store(tmp, v);
  memcpy(p, tmp, static_cast<size_t>(n) * sizeof(E));
}
template <class E>
MOEFFN_INLINE vf load_upto(const E* p, int64_t n) {
  return n >= W ? load(p) : load_part(p, n);
}
template <class E>
MOEFFN_INLINE void store_upto(E* p, vf v, int64_t n) {
  if (n >= W)
    store(p, v);
  else
    store_part(p, v, n);
}

MOEFFN_INLINE float sum(vf v) {
#if MOEFFN_WIDTH == 16
  return _mm512_reduce_add_ps((__m512)v);
#else
  float t[W];
  store(t, v);
  for (int n = W / 2; n >= 1; n /= 2)
    for (int i = 0; i < n; ++i) t[i] += t[i + n];
  return t[0];
#endif
}

// Calls f with a pointer of the array's element type: every dtype switch of the kernels is this one.
template <class Fn>
MOEFFN_INLINE void with_type(const void* p, DType t, const Fn& f) {
  if (t == DType::f32)
    f(static_cast<const float*>(p));
  else if (t == DType::bf16)
    f(static_cast<const bf16*>(p));
  else
    f(static_cast<const f16*>(p));
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
