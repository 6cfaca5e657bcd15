// The Python module moeffn._native. Tensors come as addresses that moeffn/backends/native.py has checked: turning a
// torch tensor into an ndarray here costs about 2 us each, an address 0.1 us.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

#include "backward_bindings.h"
#include "cpu.h"
#include "forward.h"
#include "kernels.h"
#include "plain.h"
#include "plan.h"
#include "problem.h"
#include "route.h"
#include "rows.h"
#include "scratch.h"
#include "threads.h"

namespace nb = nanobind;
using namespace moeffn;

namespace {

using Address = uintptr_t;

template <class T>
T* ptr(Address a) {
  return reinterpret_cast<T*>(a);
}

DType dtype_of(int code) {
  if (code < 0 || code > 2) throw BadArgument("dtype: expected 0 (float32), 1 (bfloat16) or 2 (float16), got " + std::to_string(code));
  return static_cast<DType>(code);
}

// (address, dtype code, strides) of a tensor of up to three dimensions.
Array array_of(const nb::tuple& t) {
  Array a;
  a.data = ptr<const void>(nb::cast<Address>(t[0]));
  a.dtype = dtype_of(nb::cast<int>(t[1]));
  if (nb::len(t) > 2) a.s0 = nb::cast<int64_t>(t[2]);
  if (nb::len(t) > 3) a.s1 = nb::cast<int64_t>(t[3]);
  if (nb::len(t) > 4) a.s2 = nb::cast<int64_t>(t[4]);
  return a;
}

Experts experts_of(int64_t E, int64_t F, int64_t D, const nb::tuple& activation, bool interleaved, const nb::tuple& w_in,
                   const nb::tuple& w_out, const nb::object& b_in, const nb::object& b_out) {
  Experts w;
  w.E = E;
  w.F = F;
  w.D = D;
  if (E < 0 || F < 1 || D < 1) throw BadArgument("weights: expected D >= 1 and F >= 1, got D = " + std::to_string(D) + ", F = " + std::to_string(F));
  w.act = activation_of(activation);
  w.interleaved = interleaved && w.act.gated;
  w.w_in = array_of(w_in);
  w.w_out = array_of(w_out);
  if (!b_in.is_none()) w.b_in = array_of(nb::cast<nb::tuple>(b_in));
  if (!b_out.is_none()) w.b_out = array_of(nb::cast<nb::tuple>(b_out));
  if (w.w_in.dtype != w.w_out.dtype) throw BadArgument("w_out: expected the dtype of w_in");
  return w;
}


Forward call_of(Address x, int dtype, int64_t T, int64_t s0, int64_t s1, int64_t K, Address weights, bool on_input, Address y) {
  Forward f;
  f.T = T;
  f.x.data = ptr<const void>(x);
  f.x.dtype = dtype_of(dtype);
  f.x.s0 = s0;
  f.x.s1 = s1;
  f.plan.K = K;
  f.weights = ptr<const float>(weights);
  f.apply_to_input = on_input;
  f.y = ptr<void>(y);
  if (T < 0 || K < 1) throw BadArgument("experts: expected T >= 0 and K >= 1, got T = " + std::to_string(T) + ", K = " + std::to_string(K));
  return f;
}

void run_forward(const Experts& w, Address x, int dtype, int64_t T, int64_t s0, int64_t s1, int64_t K, Address offsets,
                 Address slot_of_row, Address row_of_slot, Address weights, bool on_input, Address y, Address h) {
  Forward f = call_of(x, dtype, T, s0, s1, K, weights, on_input, y);
  f.plan.offsets = ptr<const int32_t>(offsets);
  f.plan.slot_of_row = ptr<const int32_t>(slot_of_row);
  f.plan.row_of_slot = ptr<const int32_t>(row_of_slot);
  f.h = ptr<void>(h);
  nb::gil_scoped_release release;
  check_plan(f.plan, T * K, w.E);
  last_kernel = forward(w, f, chosen_isa());
}

// Plan and forward.
void moe(const Experts& w, Forward& f, const int32_t* experts) {
  const int64_t N = f.T * f.plan.K;
  std::vector<int32_t> memory(static_cast<size_t>(w.E + 1 + 2 * N));
  int32_t* offsets = memory.data();
  make_plan(experts, N, w.E, nullptr, offsets, offsets + w.E + 1, offsets + w.E + 1 + N);
  f.plan.offsets = offsets;
  f.plan.slot_of_row = offsets + w.E + 1;
  f.plan.row_of_slot = offsets + w.E + 1 + N;
  last_kernel = forward(w, f, chosen_isa());
}

// Plan and forward in one call: what inference without gradients needs.
void run_moe(const Experts& w, Address x, int dtype, int64_t T, int64_t s0, int64_t s1, int64_t K, Address experts,
             Address weights, bool on_input, Address y, const Experts* shared, Address shared_gate) {
  Forward f = call_of(x, dtype, T, s0, s1, K, weights, on_input, y);
  if (shared && (shared->E != 1 || shared->D != w.D)) throw BadArgument("shared: expected one expert of the same D");
  f.shared = shared;
  f.shared_gate = ptr<const float>(shared_gate);
  nb::gil_scoped_release release;
  moe(w, f, ptr<const int32_t>(experts));
}

Plain* plain = nullptr;  // never freed: objects must not be released after the interpreter

// moe_ffn(x, routing, weights, backend=backend), or None when the call is not plain.
nb::object plain_moe(nb::handle x, nb::handle routing, nb::handle weights, nb::handle backend) {
  PlainCall call;
  if (!plain || !plain->read(x.ptr(), routing.ptr(), weights.ptr(), backend.ptr(), call)) return nb::none();
  call.f.maker = &call;
  call.f.make_y = [](void* maker, void** y) {
    PlainCall& call = *static_cast<PlainCall*>(maker);
    const bool made = plain->finish(call);
    *y = call.f.y;
    return made;
  };
  moe(call.w, call.f, call.ids);
  return call.unlocked ? (call.unlocked.reset(), call.y) : nb::none();
}

void run_plan(Address experts, int64_t N, int64_t E, Address counts, Address offsets, Address slot_of_row, Address row_of_slot) {
  nb::gil_scoped_release release;
  make_plan(ptr<const int32_t>(experts), N, E, ptr<int32_t>(counts), ptr<int32_t>(offsets), ptr<int32_t>(slot_of_row),
            ptr<int32_t>(row_of_slot));
}

void run_route(Address logits, int64_t T, const nb::tuple& router, Address bias, Address experts, Address weights) {
  Router r = router_of(router);
  r.selection_bias = ptr<const float>(bias);
  nb::gil_scoped_release release;
  route(r, ptr<const float>(logits), T, ptr<int32_t>(experts), ptr<float>(weights));
}

// (experts, weights, logits) of a router, or None when the call is not plain.
nb::object plain_route(nb::handle x, nb::handle weight, nb::handle bias, nb::handle selection_bias, nb::handle config) {
  PlainRoute call;
  if (!plain || !plain->prepare(x.ptr(), weight.ptr(), bias.ptr(), selection_bias.ptr(), config.ptr(), call)) return nb::none();
  {
    nb::gil_scoped_release release;
    logits(call.s, chosen_isa());
    route(call.r, call.s.out, call.s.T, call.experts, call.weights);
  }
  return call.outputs;
}

void run_sum_rows(int dtype, int64_t T, int64_t R, int64_t D, Address rows, int64_t S, int64_t row_bytes, Address index,
                  Address first, int64_t first_bytes, Address y) {
  RowSum s;
  s.T = T;
  s.R = R;
  s.D = D;
  s.dtype = dtype_of(dtype);
  if (s.dtype == DType::f16) throw BadArgument("rows: expected float32 or bfloat16");
  s.rows = ptr<const char>(rows);
  s.S = S;
  s.row_bytes = row_bytes;
  s.index = ptr<const int32_t>(index);
  s.first = ptr<const char>(first);
  s.first_bytes = first_bytes;
  s.y = ptr<char>(y);
  nb::gil_scoped_release release;
  sum_rows(s);
}

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Multiply-adds in registers on all threads: the FLOPs that were done.
double spin(bool pairs) {
  const Probe* p = pick_probe(chosen_isa());
  nb::gil_scoped_release release;
  std::atomic<int64_t> flops{0};
  parallel(max_threads(), [&](int thread, int) {
    float sink = 0;
    flops += static_cast<int64_t>((pairs ? p->pair_macs : p->float_macs)(1 << 20, static_cast<float>(thread), &sink));
  });
  return static_cast<double>(flops);
}

// FLOP/s of spin, best of a few runs.
double peak_flops(bool pairs) {
  double best = 0;
  for (int run = 0; run < 5; ++run) {
    const double start = seconds();
    best = std::max(best, spin(pairs) / (seconds() - start));
  }
  return best;
}

// Bytes per second of a plain read of (address, bytes) ranges on all threads, each of which reads its share of every range;
// best of `runs`.
double read_bandwidth(const std::vector<std::pair<Address, int64_t>>& ranges, int runs) {
  const Probe* p = pick_probe(chosen_isa());
  nb::gil_scoped_release release;
  int64_t bytes = 0;
  for (const auto& r : ranges) bytes += r.second;
  double best = 0;
  std::atomic<int> sink{0};
  for (int run = 0; run < runs; ++run) {
    const double start = seconds();
    parallel(max_threads(), [&](int thread, int threads) {
      for (const auto& r : ranges) {
        const int64_t share = r.second / threads;
        if (p->read(ptr<const char>(r.first) + thread * share, share) == 1.0f) ++sink;
      }
    });
    best = std::max(best, static_cast<double>(bytes) / (seconds() - start));
  }
  return best;
}

}  // namespace

NB_MODULE(_native, m) {
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const BadArgument& e) {
      PyErr_SetString(PyExc_ValueError, e.what());
    }
  });
  nb::class_<Experts>(m, "Experts").def_ro("E", &Experts::E).def_ro("F", &Experts::F).def_ro("D", &Experts::D);
  m.def("experts", &experts_of, nb::arg("E"), nb::arg("F"), nb::arg("D"), nb::arg("activation"), nb::arg("interleaved"),
        nb::arg("w_in"), nb::arg("w_out"), nb::arg("b_in").none(), nb::arg("b_out").none());
  m.def("forward", &run_forward);
  m.def("moe", &run_moe, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), nb::arg("shared").none() = nb::none(), nb::arg("shared_gate") = 0);
  m.def("plain_moe", &plain_moe);
  m.def("plain_route", &plain_route, nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg());
  m.def("bind_torch", [](const nb::dict& torch) { plain = new Plain(torch); });
  m.def("last_kernel", []() { return last_kernel.load(); });
  m.def("plan", &run_plan);
  m.def("route", &run_route);
  m.def("sum_rows", &run_sum_rows);
  m.def("spin", &spin, nb::arg("pairs"));
  m.def("peak_flops", &peak_flops, nb::arg("pairs"));
  m.def("read_bandwidth", &read_bandwidth, nb::arg("ranges"), nb::arg("runs") = 3);
  m.def("threads", &max_threads);
  m.def("scratch_held", &scratch_held);
  m.def("scratch_release", &scratch_release);
  m.def("isa", []() { return std::string(isa_name(chosen_isa())); });
  m.def("isas", []() {
    nb::list names;
    for (int i = 0; i < kIsas; ++i)
      if (isa_supported(static_cast<Isa>(i))) names.append(isa_name(static_cast<Isa>(i)));
    return names;
  });
  m.def("force_isa", [](const std::string& name) { force_isa(name.c_str()); });
  bind_backward(m);
}
