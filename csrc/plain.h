// Plain inference straight from Python objects, in one call. While a layer decodes, its weights stream through the caches,
// so that the next call finds none of Python's memory there, and each attribute or method of a tensor that Python touches
// costs 3 to 10 us: 0.2 to 0.4 ms a call in all, where the kernels take 2. Here everything is read from C++, tensors through
// the table of C functions that torch offers for exchanging them (DLPack). What is not plain is left to Python.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <vector>

#include "problem.h"
#include "route.h"

namespace moeffn {

namespace nb = nanobind;

using Described = nb::dlpack::dltensor;
// DLPackExchangeAPI of dlpack.h, major version 1.
struct Exchange {
  uint32_t major, minor;
  void *older, *allocate, *share, *make;
  int (*describe)(void* tensor, Described* out);
  void* stream;
};

// A call that is being prepared: the tensors it reads, and the objects it keeps alive.
struct PlainArguments {
  PyObject* tensors[8];
  int tensor_count = 0;
  nb::object held[10];
  int held_count = 0;
};

struct PlainCall : PlainArguments {
  Experts w;
  Forward f;
  const int32_t* ids = nullptr;
  Described x;
  PyObject* x_object = nullptr;
  nb::object y;
  std::optional<nb::gil_scoped_release> unlocked;  // last: the objects above are released under the lock
};

struct PlainRoute : PlainArguments {
  Router r;
  Scores s;
  nb::object outputs;  // (experts, weights, logits)
  int32_t* experts = nullptr;
  float* weights = nullptr;
};

// What moeffn/backends/native.py makes of a moeffn.config.RouterConfig.
inline Router router_of(const nb::tuple& t) {
  Router r;
  r.E = nb::cast<int64_t>(t[0]);
  r.K = nb::cast<int64_t>(t[1]);
  r.score = nb::cast<bool>(t[2]) ? Score::sigmoid : Score::softmax;
  r.score_selected = nb::cast<bool>(t[3]);
  r.renormalize = nb::cast<bool>(t[4]);
  r.renorm_eps = nb::cast<float>(t[5]);
  r.scale = nb::cast<float>(t[6]);
  return r;
}

// What moeffn/backends/native.py makes of a moeffn.config.Activation.
inline Activation activation_of(const nb::tuple& t) {
  const int kind = nb::cast<int>(t[0]);
  if (kind < 0 || kind > 6) throw BadArgument("activation: unknown kind " + std::to_string(kind));
  Activation a;
  a.kind = static_cast<Kind>(kind);
  a.gated = nb::cast<bool>(t[1]);
  a.alpha = nb::cast<float>(t[2]);
  a.has_limit = nb::cast<bool>(t[3]);
  a.limit = nb::cast<float>(t[4]);
  a.limit_after = nb::cast<bool>(t[5]);
  a.up_offset = nb::cast<float>(t[6]);
  a.softcap_gate = nb::cast<float>(t[7]);
  a.softcap_up = nb::cast<float>(t[8]);
  return a;
}

// What a function in Python makes of a frozen object, asked once for each object.
template <class T, T (*read)(const nb::tuple&)>
class Known {
 public:
  // False when it makes nothing of it.
  bool find(PyObject* object, PyObject* function, T& to) {
    auto at = known_.find(object);
    if (at == known_.end()) {
      const nb::object values = nb::steal(PyObject_CallOneArg(function, object));
      if (!values.is_valid()) return false;
      if (known_.size() >= 256) known_.clear();
      Entry entry{nb::borrow(object), !values.is_none(), T()};
      if (entry.some) entry.value = read(nb::cast<nb::tuple>(values));
      at = known_.emplace(object, std::move(entry)).first;
    }
    to = at->second.value;
    return at->second.some;
  }

 private:
  struct Entry {
    nb::object held;  // so that no other object takes its address
    bool some;
    T value;
  };
  std::unordered_map<PyObject*, Entry> known_;
};

class Plain {
 public:
  // `torch`: the classes and functions named below, each by its name.
  explicit Plain(const nb::dict& torch) : torch_(torch) {
    auto get = [&](const char* name) { return nb::object(torch[name]).ptr(); };
    tensor_ = get("Tensor");
    parameter_ = get("Parameter");
    routing_ = get("Routing");
    empty_like_ = get("empty_like");
    is_grad_enabled_ = get("is_grad_enabled");
    is_autocast_enabled_ = get("is_autocast_enabled");
    dispatch_modes_ = get("dispatch_modes");
    is_tracing_ = get("is_tracing");
    is_neg_ = get("is_neg");
    forward_ad_ = get("forward_ad");
    activation_ = get("activation");
    router_ = get("router");
    latest_ = get("latest");
    route_outputs_ = get("route_outputs");
    interleaved_ = get("interleaved");
    const auto* table = static_cast<const Exchange*>(PyCapsule_GetPointer(get("exchange"), "dlpack_exchange_api"));
    if (!table) throw nb::python_error();
    if (table->major == 1) describe_ = table->describe;
  }

  // moe_ffn(x, routing, weights, backend=backend), where `weights` has the attributes of an ExpertWeights: reads what the
  // kernels need. False for what is not plain: tensors of other types or elsewhere, arguments that do not fit.
  bool read(PyObject* x, PyObject* routing, PyObject* weights, PyObject* backend, PlainCall& call) {
    return cleared(describe_ && means_native(backend) && type_is(routing, routing_) && read_weights(weights, call) &&
                   read_routing(routing, call) && read_x(x, call) && (likely_ || unwatched(call)));
  }

  // What `read` left for the time in which other threads begin: whether something watches or differentiates, and y. Notes
  // down the backend, and gives the lock away. False for what is not plain.
  bool finish(PlainCall& call) {
    const bool plain = cleared(unwatched(call) && make_y(call) &&
                               PyDict_SetItem(latest_, names_.backend, names_.native) == 0);
    likely_ = plain;
    if (plain) call.unlocked.emplace();  // from here on likely_ is other threads'
    return plain;
  }

  // The same for a router: x (T, D), weight (E, D), bias and selection_bias (E,) or None.
  bool prepare(PyObject* x, PyObject* weight, PyObject* bias, PyObject* selection_bias, PyObject* config, PlainRoute& call) {
    return cleared(describe_ && routers_.find(config, router_, call.r) && read_scores(x, weight, bias, call) &&
                   read_selection_bias(selection_bias, call) && unwatched(call) && make_outputs(x, call));
  }

 private:
  static bool type_is(PyObject* o, PyObject* type) { return reinterpret_cast<PyObject*>(Py_TYPE(o)) == type; }

  bool means_native(PyObject* backend) const {
    return backend == names_.any_backend || backend == names_.native ||
           (PyUnicode_Check(backend) && (PyUnicode_CompareWithASCIIString(backend, "auto") == 0 ||
                                         PyUnicode_CompareWithASCIIString(backend, "native") == 0));
  }

  // Whether a function of no arguments, or of one, gives a true value; a fault counts as true.
  static bool says(PyObject* function, PyObject* argument = nullptr) {
    PyObject* result = argument ? PyObject_CallOneArg(function, argument) : PyObject_CallNoArgs(function);
    if (!result) return true;
    const int truth = PyObject_IsTrue(result);
    Py_DECREF(result);
    return truth != 0;
  }

  // Python meets the same fault again, and reports it.
  static bool cleared(bool plain) {
    if (PyErr_Occurred()) PyErr_Clear();
    return plain;
  }

  // No mode, trace, autocast or transform is on, no tensor negated or in need of a gradient.
  bool unwatched(const PlainArguments& call) {
    if (says(dispatch_modes_) || says(is_tracing_) || says(is_autocast_enabled_, names_.cpu)) return false;
    const nb::object level = nb::steal(PyObject_GetAttr(forward_ad_, names_.current_level));
    if (!level.is_valid() || PyLong_AsLong(level.ptr()) >= 0) return false;
    const bool grad = says(is_grad_enabled_);
    for (int i = 0; i < call.tensor_count; ++i) {
      PyObject* o = call.tensors[i];
      if (says(is_neg_, o) || (grad && !nb::steal(PyObject_GetAttr(o, names_.requires_grad)).is(Py_False))) return false;
    }
    return true;
  }

  // An attribute, kept alive as long as the call; nullptr when there is none.
  static PyObject* field(PyObject* o, PyObject* name, PlainArguments& call) {
    nb::object& slot = call.held[call.held_count++];
    slot = nb::steal(PyObject_GetAttr(o, name));
    return slot.ptr();
  }

  // A tensor as it lies in memory; false when there is none to read. (describe_ refuses those that torch.func's transforms
  // wrap, which have no memory.)
  bool tensor(PyObject* o, int ndim, Described& d) const {
    if (!o || !(type_is(o, tensor_) || type_is(o, parameter_)) || describe_(o, &d) != 0) return false;
    if (d.device.device_type != nb::device::cpu::value || d.dtype.lanes != 1 || (ndim && d.ndim != ndim)) return false;
    if (!d.data) return false;  // symbolic zeros
    d.data = static_cast<char*>(d.data) + d.byte_offset;
    return true;
  }

  // The same of an argument, which `unwatched` will look at.
  bool argument(PyObject* o, int ndim, PlainArguments& call, Described& d) const {
    call.tensors[call.tensor_count++] = o;
    return tensor(o, ndim, d);
  }

  static bool holds(const Described& d, nb::dlpack::dtype_code code, int bits) {
    return d.dtype.code == static_cast<uint8_t>(code) && d.dtype.bits == bits;
  }
  static bool is_float(const Described& d) { return holds(d, nb::dlpack::dtype_code::Float, 32); }
  static bool is_int(const Described& d) { return holds(d, nb::dlpack::dtype_code::Int, 32); }

  static bool dtype_of(const Described& d, DType& to) {
    if (holds(d, nb::dlpack::dtype_code::Bfloat, 16)) return to = DType::bf16, true;
    if (holds(d, nb::dlpack::dtype_code::Float, 16)) return to = DType::f16, true;
    return to = DType::f32, is_float(d);
  }

  static bool contiguous(const Described& d) {
    int64_t expected = 1;
    for (int i = d.ndim - 1; i >= 0; --i) {
      if (d.shape[i] != 1 && d.strides[i] != expected) return false;
      expected *= d.shape[i];
    }
    return true;
  }

  static bool shape_is(const Described& d, std::initializer_list<int64_t> expected) {
    return d.ndim == static_cast<int>(expected.size()) && std::equal(expected.begin(), expected.end(), d.shape);
  }

  static bool array_of(const Described& d, Array& a) {
    a.data = d.data;
    a.s0 = d.strides[0];
    a.s1 = d.strides[1];
    a.s2 = d.ndim > 2 ? d.strides[2] : 0;
    return dtype_of(d, a.dtype);
  }

  bool read_weights(PyObject* weights, PlainCall& call) {
    Experts& w = call.w;
    PyObject *activation = field(weights, names_.activation, call), *layout = field(weights, names_.layout, call);
    Described in, out;
    if (!activation || !layout || !activations_.find(activation, activation_, w.act)) return false;
    if (!argument(field(weights, names_.w_in, call), 3, call, in)) return false;
    if (!argument(field(weights, names_.w_out, call), 3, call, out)) return false;
    w.interleaved = layout == interleaved_ && w.act.gated;
    w.E = in.shape[0];
    w.D = in.shape[2];
    w.F = w.act.gated ? in.shape[1] / 2 : in.shape[1];
    if (w.E < 1 || w.F < 1 || w.D < 1 || in.shape[1] != w.in_rows() || !shape_is(out, {w.E, w.D, w.F})) return false;
    if (!array_of(in, w.w_in) || !array_of(out, w.w_out) || w.w_in.dtype != w.w_out.dtype) return false;
    return read_bias(weights, names_.b_in, w.in_rows(), w.b_in, call) && read_bias(weights, names_.b_out, w.D, w.b_out, call);
  }

  bool read_bias(PyObject* weights, PyObject* name, int64_t width, Array& to, PlainCall& call) {
    PyObject* bias = field(weights, name, call);
    Described d;
    return bias == Py_None || (argument(bias, 2, call, d) && shape_is(d, {call.w.E, width}) && array_of(d, to));
  }

  bool read_routing(PyObject* routing, PlainCall& call) {
    if (field(routing, names_.identity_weights, call) != Py_None) return false;
    PyObject* apply_to = field(routing, names_.apply_to, call);
    if (!apply_to || !PyUnicode_Check(apply_to)) return false;
    call.f.apply_to_input = PyUnicode_CompareWithASCIIString(apply_to, "input") == 0;
    Described ids, scales;
    if (!argument(field(routing, names_.experts, call), 2, call, ids)) return false;
    if (!argument(field(routing, names_.weights, call), 2, call, scales)) return false;
    if (!is_int(ids) || !is_float(scales)) return false;
    if (!contiguous(ids) || !contiguous(scales) || !shape_is(scales, {ids.shape[0], ids.shape[1]})) return false;
    call.f.T = ids.shape[0];
    call.f.plan.K = ids.shape[1];
    call.ids = static_cast<const int32_t*>(ids.data);
    call.f.weights = static_cast<const float*>(scales.data);
    return true;
  }

  bool read_x(PyObject* x, PlainCall& call) {
    Described& in = call.x;
    const Experts& w = call.w;
    Array& a = call.f.x;
    call.x_object = x;
    if (!argument(x, 0, call, in) || in.ndim < 1 || in.shape[in.ndim - 1] != w.D) return false;
    if (!contiguous(in) || !dtype_of(in, a.dtype)) return false;
    if (a.dtype != DType::f32 && a.dtype != w.w_in.dtype) return false;  // what is narrower than the weights is widened
    int64_t tokens = 1;
    for (int i = 0; i + 1 < in.ndim; ++i) tokens *= in.shape[i];
    if (tokens != call.f.T) return false;
    a.data = in.data;
    a.s0 = w.D;
    a.s1 = 1;
    return true;
  }

  bool make_y(PlainCall& call) {
    Described out;
    const Described& in = call.x;
    call.y = nb::steal(PyObject_CallOneArg(empty_like_, call.x_object));
    if (!call.y.is_valid() || !tensor(call.y.ptr(), in.ndim, out) || !contiguous(out)) return false;
    if (out.dtype != in.dtype || !std::equal(in.shape, in.shape + in.ndim, out.shape)) return false;
    call.f.y = out.data;
    return true;
  }

  bool read_scores(PyObject* x, PyObject* weight, PyObject* bias, PlainRoute& call) {
    Scores& s = call.s;
    Described in, w, b;
    if (!argument(x, 2, call, in) || !contiguous(in) || !array_of(in, s.x) || in.shape[0] > kMostTokens) return false;
    s.T = in.shape[0];
    s.D = in.shape[1];
    s.C = call.r.E;
    if (!argument(weight, 2, call, w) || !shape_is(w, {s.C, s.D}) || !array_of(w, s.w) || (s.w.s1 != 1 && s.D > 1)) return false;
    if (bias == Py_None) return true;
    if (!argument(bias, 1, call, b) || !shape_is(b, {s.C}) || !dtype_of(b, s.b.dtype)) return false;
    s.b.data = b.data;
    s.b.s1 = b.strides[0];
    return true;
  }

  bool read_selection_bias(PyObject* bias, PlainRoute& call) {
    Described d;
    if (bias == Py_None) return true;
    if (!argument(bias, 1, call, d) || !shape_is(d, {call.r.E}) || !contiguous(d) || !is_float(d)) return false;
    call.r.selection_bias = static_cast<const float*>(d.data);
    return true;
  }

  bool make_outputs(PyObject* x, PlainRoute& call) {
    const int64_t T = call.s.T, K = call.r.K;
    call.outputs = nb::steal(PyObject_CallFunction(route_outputs_, "OLLL", x, static_cast<long long>(T),
                                                   static_cast<long long>(K), static_cast<long long>(call.r.E)));
    if (!call.outputs.is_valid() || !PyTuple_Check(call.outputs.ptr()) || PyTuple_GET_SIZE(call.outputs.ptr()) != 3) return false;
    Described d[3];
    for (int i = 0; i < 3; ++i)
      if (!tensor(PyTuple_GET_ITEM(call.outputs.ptr(), i), 2, d[i]) || !contiguous(d[i])) return false;
    if (!shape_is(d[0], {T, K}) || !shape_is(d[1], {T, K}) || !shape_is(d[2], {T, call.r.E})) return false;
    if (!is_int(d[0]) || !is_float(d[1]) || !is_float(d[2])) return false;
    call.experts = static_cast<int32_t*>(d[0].data);
    call.weights = static_cast<float*>(d[1].data);
    call.s.out = static_cast<float*>(d[2].data);
    return true;
  }

  static constexpr int64_t kMostTokens = 64;  // more are for a matrix product
  nb::dict torch_;  // keeps alive what the pointers point to
  PyObject *tensor_, *parameter_, *routing_, *empty_like_, *is_grad_enabled_, *is_autocast_enabled_;
  PyObject *dispatch_modes_, *is_tracing_, *is_neg_, *forward_ad_, *activation_, *router_, *latest_,
      *route_outputs_, *interleaved_;
  int (*describe_)(void*, Described*) = nullptr;
  bool likely_ = true;  // the latest call was plain: so is the next, most likely, and kernels may begin before that is known
  struct Names {
    PyObject* of(const char* text) { return PyUnicode_InternFromString(text); }
    PyObject *activation = of("activation"), *layout = of("layout"), *w_in = of("w_in"), *w_out = of("w_out"),
             *b_in = of("b_in"), *b_out = of("b_out"), *identity_weights = of("identity_weights"),
             *apply_to = of("apply_to"), *experts = of("experts"), *weights = of("weights"),
             *requires_grad = of("requires_grad"), *current_level = of("_current_level"),
             *cpu = of("cpu"), *backend = of("backend"), *native = of("native"), *any_backend = of("auto");
  } names_;
  Known<Activation, activation_of> activations_;
  Known<Router, router_of> routers_;
};

}  // namespace moeffn
