// What the backward adds to the Python module.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "backward.h"
#include "cpu.h"
#include "pages.h"
#include "plan.h"

namespace moeffn {

// (address, dtype code, add to what is there, already zeroed), or None.
inline Target target_of(const nanobind::object& o) {
  Target to;
  if (o.is_none()) return to;
  const auto t = nanobind::cast<nanobind::tuple>(o);
  to.data = reinterpret_cast<void*>(nanobind::cast<uintptr_t>(t[0]));
  to.dtype = static_cast<DType>(nanobind::cast<int>(t[1]));
  to.add = nanobind::cast<bool>(t[2]);
  to.zeroed = nanobind::cast<bool>(t[3]);
  return to;
}

// dy and x are (address, row stride) of (T, D) tensors whose elements lie side by side; addresses of what is absent are 0.
inline void run_backward(const Experts& experts, int dtype, int64_t T, int64_t K, const nanobind::tuple& dy,
                         const nanobind::tuple& x, uintptr_t h, const nanobind::tuple& plan, uintptr_t weights,
                         bool on_input, uintptr_t dx, uintptr_t dweights, const nanobind::tuple& targets) {
  auto rows = [&](const nanobind::tuple& t) {
    Array a;
    a.data = reinterpret_cast<const void*>(nanobind::cast<uintptr_t>(t[0]));
    a.dtype = static_cast<DType>(dtype);
    a.s0 = nanobind::cast<int64_t>(t[1]);
    a.s1 = 1;
    return a;
  };
  auto indices = [&](int i) { return reinterpret_cast<const int32_t*>(nanobind::cast<uintptr_t>(plan[i])); };
  Backward call;
  call.T = T;
  call.dy = rows(dy);
  call.x = rows(x);
  call.h = reinterpret_cast<const void*>(h);
  call.plan.K = K;
  call.plan.offsets = indices(0);
  call.plan.slot_of_row = indices(1);
  call.plan.row_of_slot = indices(2);
  call.weights = reinterpret_cast<const float*>(weights);
  call.apply_to_input = on_input;
  call.dx = reinterpret_cast<void*>(dx);
  call.dweights = reinterpret_cast<float*>(dweights);
  call.w_in = target_of(targets[0]);
  call.w_out = target_of(targets[1]);
  call.b_in = target_of(targets[2]);
  call.b_out = target_of(targets[3]);
  if (T < 0 || K < 1) throw BadArgument("weights: expected T >= 0 and K >= 1");
  nanobind::gil_scoped_release release;
  check_plan(call.plan, T * K, experts.E);
  last_kernel = backward(experts, call);
}

// (uint8 tensor of `bytes` bytes that gives its pages back when it dies, whether they are all zeros).
inline nanobind::tuple gradient_memory(size_t bytes) {
  auto* pages = new Pages(pages_take(bytes));
  nanobind::capsule owner(pages, [](void* p) noexcept {
    pages_give(*static_cast<Pages*>(p));
    delete static_cast<Pages*>(p);
  });
  const bool zeroed = pages->zeroed;
  const size_t shape[1] = {bytes};
  nanobind::ndarray<nanobind::pytorch, uint8_t> array(pages->data, 1, shape, owner);
  return nanobind::make_tuple(array, zeroed);
}

}  // namespace moeffn

inline void bind_backward(nanobind::module_& m) {
  m.def("backward", &moeffn::run_backward);
  m.def("gradient_memory", &moeffn::gradient_memory);
  m.def("pages_held", &moeffn::pages_held);
  m.def("pages_release", &moeffn::pages_release);
}
