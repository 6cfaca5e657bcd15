// The backward's share of the fuzz. Included by fuzz.cpp after its tensors and layers.
#pragma once
#include "backward.h"

namespace {

// A gradient in a block of exactly its size, NaN before the call (or zero, when it is added to), and its truth.
struct Gradient {
  std::unique_ptr<char[]> memory;
  DType dtype = DType::f32;
  std::vector<double> truth;

  Gradient(int64_t n, DType type, bool add) : memory(new char[static_cast<size_t>(std::max<int64_t>(1, n * size_of(type)))]),
                                              dtype(type), truth(static_cast<size_t>(n), 0.0) {
    for (int64_t i = 0; i < n; ++i) {
      if (type == DType::f32)
        reinterpret_cast<float*>(memory.get())[i] = add ? 0.0f : NAN;
      else
        reinterpret_cast<uint16_t*>(memory.get())[i] = add ? 0 : type == DType::bf16 ? 0x7fc0 : 0x7e00;
    }
  }

  void check(const char* what, double tolerance, const std::string& problem) const {
    double error = 0, norm = 0;
    const Array a{memory.get(), dtype, 1, 0, 0};
    for (size_t i = 0; i < truth.size(); ++i) {
      const void* p = a.at(static_cast<int64_t>(i));
      const double got = dtype == DType::f32    ? *static_cast<const float*>(p)
                         : dtype == DType::bf16 ? from_bf16(*static_cast<const uint16_t*>(p))
                                                : from_f16(*static_cast<const uint16_t*>(p));
      if (!std::isfinite(got)) fail(what, problem + " not finite at " + std::to_string(i));
      error += (got - truth[i]) * (got - truth[i]);
      norm += truth[i] * truth[i];
    }
    // A hundred values and more average their errors; fewer may all be the difference of large terms.
    if (std::sqrt(error) > tolerance * (std::sqrt(norm) + (truth.size() < 100 ? 10.0 : 1.0)))
      fail(what, problem + " error " + std::to_string(std::sqrt(error)) + " of " + std::to_string(std::sqrt(norm)));
  }
};

void fuzz_backward(Isa isa) {
  const DType types[] = {DType::f32, DType::bf16, DType::f16};
  const DType xt = types[pick(0, 2)], wt = chance(0.7) ? xt : types[pick(0, 2)];
  const bool many = chance(0.1);
  const int64_t E = many ? pick(100, 1024) : pick(1, 12), K = pick(1, std::min<int64_t>(E, 4));
  const int64_t D = pick(1, many ? 8 : chance(0.1) ? 200 : 60), F = pick(1, many ? 8 : chance(0.1) ? 200 : 60);
  const int64_t T = chance(0.05) ? 0 : pick(1, many ? 12 : chance(0.1) ? 90 : 20), N = T * K;
  Layer layer(E, F, D, wt, chance(0.5) ? wt : DType::f32);
  const Experts& w = layer.w;
  const int64_t H = w.in_rows();
  Tensor x = tensor(xt, T, D, 1, false, 1), dy = tensor(xt, T, D, 1, false, 1), h = tensor(xt, N, H, 1, false, 1);

  std::vector<int32_t> ids(static_cast<size_t>(N)), offsets(static_cast<size_t>(E + 1)), slots(ids.size()), rows(ids.size());
  const int64_t hot = chance(0.3) ? pick(1, E) : E;
  for (int32_t& id : ids) id = chance(0.1) ? -1 : static_cast<int32_t>(pick(0, hot - 1));
  std::vector<float> weights(ids.size());
  for (float& v : weights) v = std::fabs(normal());
  make_plan(ids.data(), N, E, nullptr, offsets.data(), slots.data(), rows.data());

  Backward call;
  call.T = T;
  call.dy = dy.view;
  call.x = x.view;
  call.dy.s1 = call.x.s1 = 1;
  call.h = h.view.data;
  call.plan = {K, offsets.data(), slots.data(), rows.data()};
  call.weights = weights.data();
  call.apply_to_input = chance(0.3);
  const bool add = chance(0.3);
  const DType gt = add && chance(0.5) ? DType::f32 : wt;
  Gradient dx(T * D, xt, false), ds(N, DType::f32, false), d_in(E * H * D, gt, add), d_out(E * D * F, gt, add);
  Gradient db_in(E * H, DType::f32, add), db_out(E * D, DType::f32, add);
  const bool want[6] = {chance(0.8), chance(0.8), chance(0.8), chance(0.8), chance(0.5), chance(0.5)};
  if (want[0]) call.dx = dx.memory.get();
  if (want[1]) call.dweights = reinterpret_cast<float*>(ds.memory.get());
  if (want[2]) call.w_in = {d_in.memory.get(), gt, add, false};
  if (want[3]) call.w_out = {d_out.memory.get(), gt, add, false};
  if (want[4]) call.b_in = {db_in.memory.get(), DType::f32, add, false};
  if (want[5]) call.b_out = {db_out.memory.get(), DType::f32, add, false};

  for (int64_t e = 0; e < E; ++e)
    for (int64_t r = offsets[static_cast<size_t>(e)]; r < offsets[static_cast<size_t>(e + 1)]; ++r) {
      const int64_t s = slots[static_cast<size_t>(r)], t = s / K;
      const double weight = weights[static_cast<size_t>(s)], scale = call.apply_to_input ? 1.0 : weight;
      std::vector<double> dh(static_cast<size_t>(H), 0.0), a(static_cast<size_t>(F)), row(static_cast<size_t>(D), 0.0);
      double dot = 0;
      for (int64_t f = 0; f < F; ++f) {
        double da = 0;
        for (int64_t d = 0; d < D; ++d) da += dy.at(t, d) * layer.w_out.at(e, d, f);
        const int64_t g = f * w.gate_step(), u = g + w.up_shift();
        const double gate = h.at(r, g), up = w.act.gated ? h.at(r, u) : 0, step = 1e-9;
        const double value = a[static_cast<size_t>(f)] = hidden_of(w.act, gate, up);
        dot += da * value;
        // One-sided, from within the clamps: values of 16 bits often lie on a bound, which passes the gradient. No float
        // is nearer to a bound than such a step, unless it lies on it.
        dh[static_cast<size_t>(g)] = scale * da * (value - hidden_of(w.act, gate - step, up)) / step;
        const double inward = up > 0 ? -step : step;
        if (w.act.gated)
          dh[static_cast<size_t>(u)] = scale * da * (hidden_of(w.act, gate, up + inward) - value) / inward;
      }
      for (int64_t d = 0; d < D; ++d) {
        if (w.b_out.data) dot += dy.at(t, d) * layer.b_out.at(e, d);
        db_out.truth[static_cast<size_t>(e * D + d)] += scale * dy.at(t, d);
        for (int64_t f = 0; f < F; ++f)
          d_out.truth[static_cast<size_t>((e * D + d) * F + f)] += scale * dy.at(t, d) * a[static_cast<size_t>(f)];
      }
      for (int64_t i = 0; i < H; ++i) {
        const double v = dh[static_cast<size_t>(i)];
        db_in.truth[static_cast<size_t>(e * H + i)] += v;
        for (int64_t d = 0; d < D; ++d) {
          row[static_cast<size_t>(d)] += v * layer.w_in.at(e, i, d);
          d_in.truth[static_cast<size_t>((e * H + i) * D + d)] += v * x.at(t, d) * (call.apply_to_input ? weight : 1.0);
        }
      }
      double on_input = 0;
      for (int64_t d = 0; d < D; ++d) {
        on_input += row[static_cast<size_t>(d)] * x.at(t, d);
        dx.truth[static_cast<size_t>(t * D + d)] += (call.apply_to_input ? weight : 1.0) * row[static_cast<size_t>(d)];
      }
      ds.truth[static_cast<size_t>(s)] = call.apply_to_input ? on_input : dot;
    }

  force_isa(isa_name(isa));
  backward(w, call);
  const std::string problem = std::string("backward ") + isa_name(isa) + " x=" + std::to_string(static_cast<int>(xt)) +
                              " w=" + std::to_string(static_cast<int>(wt)) + " T=" + std::to_string(T) + " K=" +
                              std::to_string(K) + " E=" + std::to_string(E) + " D=" + std::to_string(D) + " F=" +
                              std::to_string(F) + " kind=" + std::to_string(static_cast<int>(w.act.kind)) +
                              " input=" + std::to_string(call.apply_to_input);
  const double most = 3 * tolerance(xt, wt);
  if (want[0]) dx.check("dx", most, problem);
  if (want[1]) ds.check("d weights", most, problem);
  if (want[2]) d_in.check("d w_in", most, problem);
  if (want[3]) d_out.check("d w_out", most, problem);
  if (want[4]) db_in.check("d b_in", most, problem);
  if (want[5]) db_out.check("d b_out", most, problem);
}

}  // namespace
