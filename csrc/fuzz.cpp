// Random problems against a plain double-precision loop, meant to run under ASan and UBSan: every array is a heap block
// of exactly its size, outputs are poisoned with NaN, and each instruction set of the machine takes its turn.
//
//     moeffn_fuzz [problems = 2000] [seed = 1]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "cpu.h"
#include "forward.h"
#include "plan.h"
#include "problem.h"
#include "route.h"
#include "threads.h"

using namespace moeffn;

namespace {

std::mt19937_64 rng;

int64_t pick(int64_t lo, int64_t hi) { return std::uniform_int_distribution<int64_t>(lo, hi)(rng); }
bool chance(double p) { return std::uniform_real_distribution<double>(0, 1)(rng) < p; }
float normal() { return std::normal_distribution<float>(0, 1)(rng); }

uint16_t to_bf16(float f) {
  uint32_t w;
  std::memcpy(&w, &f, 4);
  return std::isnan(f) ? uint16_t{0x7fc0} : static_cast<uint16_t>((w + 0x7fffu + ((w >> 16) & 1)) >> 16);
}
float from_bf16(uint16_t h) {
  const uint32_t w = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &w, 4);
  return f;
}
float from_f16(uint16_t h) {
  const int e = (h >> 10) & 31, m = h & 1023;
  const float v = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1.0f + m / 1024.0f, e - 15) : std::ldexp(m / 1024.0f, -14);
  return h & 0x8000 ? -v : v;
}
uint16_t to_f16(float f) {  // truncates: the fuzz only needs representable inputs
  const uint16_t sign = std::signbit(f) ? 0x8000 : 0;
  f = std::fabs(f);
  if (std::isnan(f)) return 0x7e00;
  if (f < 6.2e-5f) return sign;
  int e;
  const float m = std::frexp(f, &e);
  return static_cast<uint16_t>(sign | ((e + 14) << 10) | static_cast<int>((m * 2 - 1) * 1024));
}

// An array of logical shape (n0, n1, n2) in a block of exactly its elements, with the dimensions in a random order.
struct Tensor {
  Array view;
  std::unique_ptr<char[]> memory;
  int64_t n[3];

  double at(int64_t i, int64_t j = 0, int64_t k = 0) const {
    const void* p = view.at(i, j, k);
    if (view.dtype == DType::f32) return *static_cast<const float*>(p);
    const uint16_t h = *static_cast<const uint16_t*>(p);
    return view.dtype == DType::bf16 ? from_bf16(h) : from_f16(h);
  }
  void set(float v, int64_t i, int64_t j = 0, int64_t k = 0) {
    void* p = const_cast<void*>(view.at(i, j, k));
    if (view.dtype == DType::f32)
      *static_cast<float*>(p) = v;
    else
      *static_cast<uint16_t*>(p) = view.dtype == DType::bf16 ? to_bf16(v) : to_f16(v);
  }
};

Tensor tensor(DType dtype, int64_t n0, int64_t n1, int64_t n2, bool shuffled, float scale) {
  Tensor t;
  t.n[0] = n0;
  t.n[1] = n1;
  t.n[2] = n2;
  int order[3] = {0, 1, 2};
  if (shuffled) std::shuffle(order, order + 3, rng);
  int64_t stride[3], step = 1;
  for (int i = 2; i >= 0; --i) {
    stride[order[i]] = step;
    step *= t.n[order[i]];
  }
  t.memory.reset(new char[static_cast<size_t>(std::max<int64_t>(1, step * size_of(dtype)))]);
  t.view = {t.memory.get(), dtype, stride[0], stride[1], stride[2]};
  for (int64_t i = 0; i < n0; ++i)
    for (int64_t j = 0; j < n1; ++j)
      for (int64_t k = 0; k < n2; ++k) t.set(normal() * scale, i, j, k);
  return t;
}

double act_of(const Activation& a, double g) {
  const double s = 1 / (1 + std::exp(-a.alpha * g));
  switch (a.kind) {
    case Kind::silu: return (a.softcap_gate > 0 ? a.softcap_gate * std::tanh(g / a.softcap_gate) : g) * s;
    case Kind::gelu: return 0.5 * g * (1 + std::erf(g / std::sqrt(2.0)));
    case Kind::gelu_tanh: return 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
    case Kind::relu: return g > 0 ? g : 0;
    case Kind::relu2: return g > 0 ? g * g : 0;
    case Kind::sigmoid: return s;
    default: return g;
  }
}

double hidden_of(const Activation& a, double g, double u) {
  if (a.has_limit && !a.limit_after) g = std::min<double>(g, a.limit);
  double r = act_of(a, g);
  if (a.has_limit && a.limit_after) r = std::min<double>(r, a.limit);
  if (!a.gated) return r;
  if (a.has_limit) u = std::clamp<double>(u, -a.limit, a.limit);
  if (a.softcap_up > 0) u = a.softcap_up * std::tanh(u / a.softcap_up);
  return r * (u + a.up_offset);
}

struct Layer {
  Experts w;
  Tensor w_in, w_out, b_in, b_out;

  Layer(int64_t E, int64_t F, int64_t D, DType dtype, DType bias) {
    w.E = E;
    w.F = F;
    w.D = D;
    Activation& a = w.act;
    a.kind = static_cast<Kind>(pick(0, 6));
    a.gated = chance(0.8);
    w.interleaved = a.gated && chance(0.4);
    if (a.gated && chance(0.3)) {
      a.has_limit = true;
      a.limit = 1.0f;
      a.limit_after = chance(0.5);
      a.up_offset = 1.0f;
    } else if (a.gated && a.kind == Kind::silu && chance(0.3)) {
      a.softcap_gate = 1.5f;
      a.softcap_up = 2.0f;
    }
    if (a.kind == Kind::silu && a.softcap_gate == 0) a.alpha = chance(0.5) ? 1.0f : 1.702f;
    const bool shuffled = chance(0.3);
    w_in = tensor(dtype, E, w.in_rows(), D, shuffled, 1 / std::sqrt(static_cast<float>(D)));
    w_out = tensor(dtype, E, D, F, shuffled, 1 / std::sqrt(static_cast<float>(F)));
    w.w_in = w_in.view;
    w.w_out = w_out.view;
    if (chance(0.5)) {
      b_in = tensor(bias, E, w.in_rows(), 1, false, 1);
      b_out = tensor(bias, E, D, 1, false, 1);
      w.b_in = b_in.view;
      w.b_out = b_out.view;
    }
  }

  // h (in_rows) and y (D) of one expert for one input row.
  void one(int64_t e, const std::vector<double>& x, std::vector<double>& h, std::vector<double>& y) const {
    h.assign(static_cast<size_t>(w.in_rows()), 0);
    for (int64_t r = 0; r < w.in_rows(); ++r) {
      for (int64_t d = 0; d < w.D; ++d) h[r] += x[d] * w_in.at(e, r, d);
      if (w.b_in.data) h[r] += b_in.at(e, r);
    }
    y.assign(static_cast<size_t>(w.D), 0);
    for (int64_t f = 0; f < w.F; ++f) {
      const int64_t g = f * w.gate_step();
      const double a = hidden_of(w.act, h[g], w.act.gated ? h[g + w.up_shift()] : 0);
      for (int64_t d = 0; d < w.D; ++d) y[d] += a * w_out.at(e, d, f);
    }
    for (int64_t d = 0; w.b_out.data && d < w.D; ++d) y[d] += b_out.at(e, d);
  }
};

[[noreturn]] void fail(const char* what, const std::string& problem) {
  std::fprintf(stderr, "FAILED: %s\n%s\n", what, problem.c_str());
  std::exit(1);
}

double tolerance(DType x, DType w) { return x == DType::f32 && w == DType::f32 ? 2e-5 : x == DType::f16 ? 5e-3 : 3e-2; }

void one_layer(Isa isa) {
  const DType types[] = {DType::f32, DType::bf16, DType::f16};
  const DType xt = types[pick(0, 2)], wt = chance(0.7) ? xt : types[pick(0, 2)];
  const bool many = chance(0.1);
  const int64_t E = many ? pick(100, 1024) : pick(1, 12), K = pick(1, std::min<int64_t>(E, 6));
  const int64_t D = pick(1, many ? 8 : chance(0.2) ? 200 : 70), F = pick(1, many ? 8 : chance(0.2) ? 200 : 70);
  const bool long_blocks = !many && chance(0.05);
  const int64_t T = chance(0.05) ? 0 : long_blocks ? pick(90, 250) : pick(1, many ? 12 : chance(0.2) ? 90 : 20);
  Layer layer(E, F, D, wt, chance(0.5) ? wt : DType::f32);
  const Experts& w = layer.w;
  Tensor x = tensor(xt, T, D, 1, chance(0.2), 1);
  const bool poisoned = T > 1 && chance(0.2);
  if (poisoned)
    for (int64_t d = 0; d < D; ++d) x.set(NAN, 0, d);

  std::vector<int32_t> ids(static_cast<size_t>(T * K));
  const int64_t hot = long_blocks ? 1 : chance(0.3) ? pick(1, E) : E;  // skew: only the first few experts
  for (int32_t& id : ids) id = chance(0.1) ? static_cast<int32_t>(chance(0.5) ? -1 : E + 5) : static_cast<int32_t>(pick(0, hot - 1));
  std::vector<float> weights(static_cast<size_t>(T * K));
  for (float& v : weights) v = std::fabs(normal());
  std::vector<int32_t> counts(E), offsets(E + 1), slot_of_row(T * K), row_of_slot(T * K);
  make_plan(ids.data(), T * K, E, counts.data(), offsets.data(), slot_of_row.data(), row_of_slot.data());

  const std::string problem = std::string(isa_name(isa)) + " T=" + std::to_string(T) + " K=" + std::to_string(K) +
                              " E=" + std::to_string(E) + " D=" + std::to_string(D) + " F=" + std::to_string(F) +
                              " x=" + std::to_string(static_cast<int>(xt)) + " w=" + std::to_string(static_cast<int>(wt)) +
                              " kind=" + std::to_string(static_cast<int>(w.act.kind)) + " gated=" + std::to_string(w.act.gated) +
                              " interleaved=" + std::to_string(w.interleaved);
  Forward call;
  call.T = T;
  call.x = x.view;
  call.plan = {K, offsets.data(), slot_of_row.data(), row_of_slot.data()};
  call.weights = weights.data();
  call.apply_to_input = chance(0.3);
  const int64_t element = size_of(xt), N = T * K;
  Tensor y = tensor(xt, T, D, 1, false, 1), h = tensor(xt, N, w.in_rows(), 1, false, 1);
  std::memset(y.memory.get(), 0xff, static_cast<size_t>(T * D * element));
  struct Late {
    void* y;
    bool give_up, slow;
    int asked;
  } late{y.memory.get(), chance(0.3), chance(0.3), 0};
  const bool is_late = chance(0.3);
  if (is_late) {
    call.maker = &late;
    call.make_y = [](void* maker, void** y) {
      Late& l = *static_cast<Late*>(maker);
      ++l.asked;
      if (l.slow) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // others do all that needs no y
      *y = l.y;
      return !l.give_up;
    };
  } else {
    call.y = late.y;
  }
  if (chance(0.5)) call.h = h.memory.get();
  std::unique_ptr<Layer> shared;
  std::vector<float> gate(static_cast<size_t>(T), 0.5f);
  if (chance(0.25)) {
    shared.reset(new Layer(1, pick(1, 90), D, wt, wt));
    call.shared = &shared->w;
    if (chance(0.5)) call.shared_gate = gate.data();
  }
  check_plan(call.plan, N, E);
  forward(w, call, isa);
  if (is_late && late.asked != 1) fail("y was not asked for once", problem);
  if (is_late && late.give_up) {
    const char* bytes = y.memory.get();
    if (std::any_of(bytes, bytes + T * D * element, [](char c) { return c != '\xff'; })) fail("y was written", problem);
    return;
  }

  double error = 0, norm = 0;
  std::vector<double> row(static_cast<size_t>(D)), hx, out, total(static_cast<size_t>(D));
  for (int64_t t = 0; t < T; ++t) {
    std::fill(total.begin(), total.end(), 0);
    bool routed = false;
    for (int64_t k = 0; k < K; ++k) {
      const int64_t s = t * K + k;
      if (row_of_slot[s] < 0) continue;
      routed = true;
      for (int64_t d = 0; d < D; ++d) row[d] = x.at(t, d) * (call.apply_to_input ? weights[s] : 1);
      layer.one(ids[s], row, hx, out);
      for (int64_t d = 0; d < D; ++d) total[d] += out[d] * (call.apply_to_input ? 1 : weights[s]);
      for (int64_t r = 0; call.h && r < w.in_rows(); ++r) {
        const double diff = h.at(row_of_slot[s], r) - hx[r];
        if (!(poisoned && t == 0) && !(std::fabs(diff) <= tolerance(xt, wt) * (1 + std::fabs(hx[r])))) fail("h", problem);
      }
    }
    if (shared) {
      routed = true;
      for (int64_t d = 0; d < D; ++d) row[d] = x.at(t, d);
      shared->one(0, row, hx, out);
      for (int64_t d = 0; d < D; ++d) total[d] += out[d] * (call.shared_gate ? gate[t] : 1);
    }
    for (int64_t d = 0; d < D; ++d) {
      const double got = y.at(t, d);
      if (poisoned && t == 0) {
        if (routed && std::isnan(total[d]) && !std::isnan(got)) fail("NaN was lost", problem);
        continue;
      }
      if (!std::isfinite(got)) fail("y is not finite", problem);
      error += (got - total[d]) * (got - total[d]);
      norm += total[d] * total[d];
    }
  }
  if (!(std::sqrt(error) <= tolerance(xt, wt) * (std::sqrt(norm) + 1e-3))) fail("y", problem);
}

void one_route() {
  Router r;
  r.E = pick(1, 40);
  r.K = pick(1, r.E);
  r.score = static_cast<Score>(pick(0, 1));
  r.score_selected = chance(0.4);
  r.renormalize = chance(0.5);
  const int64_t T = pick(0, 20);
  std::vector<float> logits(static_cast<size_t>(T * r.E)), weights(static_cast<size_t>(T * r.K));
  const float odd[] = {NAN, INFINITY, -INFINITY, 0.0f, 1.0f};
  for (float& l : logits) l = chance(0.2) ? odd[pick(0, 4)] : normal();
  if (chance(0.2)) std::fill(logits.begin(), logits.end(), odd[pick(0, 4)]);
  std::vector<float> bias(static_cast<size_t>(r.E), 0.25f);
  if (chance(0.3)) r.selection_bias = bias.data();
  std::vector<int32_t> ids(static_cast<size_t>(T * r.K), -7);
  route(r, logits.data(), T, ids.data(), weights.data());
  for (int64_t t = 0; t < T; ++t) {
    std::vector<int32_t> mine(ids.begin() + t * r.K, ids.begin() + (t + 1) * r.K);
    std::sort(mine.begin(), mine.end());
    if (mine.front() < 0 || mine.back() >= r.E || std::adjacent_find(mine.begin(), mine.end()) != mine.end())
      fail("route: ids out of range or twice", "E=" + std::to_string(r.E) + " K=" + std::to_string(r.K));
  }
}

void one_logits(Isa isa) {
  Scores s;
  s.T = pick(1, 20);
  s.D = pick(1, 200);
  s.C = pick(1, 60);
  const DType types[] = {DType::f32, DType::bf16, DType::f16};
  const Tensor x = tensor(types[pick(0, 2)], s.T, s.D, 1, false, 1), w = tensor(types[pick(0, 2)], s.C, s.D, 1, false, 1),
               b = tensor(types[pick(0, 2)], 1, s.C, 1, false, 1);
  s.x = x.view;
  s.w = w.view;
  const bool bias = chance(0.5);
  if (bias) s.b = b.view;
  std::vector<float> out(static_cast<size_t>(s.T * s.C), NAN);
  s.out = out.data();
  logits(s, isa);
  for (int64_t t = 0; t < s.T; ++t)
    for (int64_t c = 0; c < s.C; ++c) {
      double sum = bias ? b.at(0, c) : 0, size = 1;
      for (int64_t d = 0; d < s.D; ++d) {
        sum += x.at(t, d) * w.at(c, d);
        size += std::fabs(x.at(t, d) * w.at(c, d));
      }
      if (!(std::fabs(out[t * s.C + c] - sum) <= 1e-6 * size))
        fail("logits", "T=" + std::to_string(s.T) + " D=" + std::to_string(s.D) + " C=" + std::to_string(s.C));
    }
}

}  // namespace

#include "fuzz_backward.h"

int main(int argc, char** argv) {
  const int problems = argc > 1 ? std::atoi(argv[1]) : 2000;
  const uint64_t seed = argc > 2 ? static_cast<uint64_t>(std::atoll(argv[2])) : 1;
  int done[kIsas] = {};
  for (int i = 0; i < problems; ++i) {
    rng.seed(seed * 1000003 + static_cast<uint64_t>(i));
    Isa isa;
    do isa = static_cast<Isa>((i + pick(0, kIsas - 1)) % kIsas);
    while (!isa_supported(isa));
    one_layer(isa);
    one_route();
    one_logits(isa);
    if (i % 2) fuzz_backward(isa);
    ++done[static_cast<int>(isa)];
  }
  std::printf("%d problems", problems);
  for (int i = 0; i < kIsas; ++i) std::printf(" %s=%d", isa_name(static_cast<Isa>(i)), done[i]);
  std::printf("\n");
  return 0;
}
