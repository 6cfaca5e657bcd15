// The words of the C++ side: what a layer is, what a call is. Plain data, no torch, no Python.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

namespace moeffn {

// A caller's mistake; the bindings turn it into a Python ValueError.
struct BadArgument : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// Used in files compiled for different instruction sets: always inlined, so that no copy compiled for one is linked into
// another.
#define MOEFFN_SMALL inline __attribute__((always_inline))

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2 };

MOEFFN_SMALL int64_t size_of(DType t) { return t == DType::f32 ? 4 : 2; }

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

enum class Kind : int { silu = 0, gelu = 1, gelu_tanh = 2, relu = 3, relu2 = 4, sigmoid = 5, identity = 6 };

// u and g are the up and the gate value: act(g) * (u + up_offset); see moeffn.config.Activation.
struct Activation {
  Kind kind = Kind::silu;
  bool gated = true;
  bool limit_after = false;  // clamp act(g) from above instead of g
  bool has_limit = false;
  float alpha = 1.0f;
  float limit = 0.0f;
  float up_offset = 0.0f;
  float softcap_gate = 0.0f;  // 0: none
  float softcap_up = 0.0f;
};

// A strided array of up to three dimensions; strides count elements and may be anything.
struct Array {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t s0 = 0, s1 = 0, s2 = 0;

  MOEFFN_SMALL const void* at(int64_t i, int64_t j = 0, int64_t k = 0) const {
    return static_cast<const char*>(data) + (i * s0 + j * s1 + k * s2) * size_of(dtype);
  }
};

// The weights of all experts. Gated: w_in (E, 2F, D), else (E, F, D); w_out (E, D, F).
struct Experts {
  int64_t E = 0, F = 0, D = 0;
  Activation act;
  bool interleaved = false;  // rows g0, u0, g1, u1, ... instead of all gates first
  Array w_in, w_out;
  Array b_in, b_out;  // data == nullptr: absent

  MOEFFN_SMALL int64_t in_rows() const { return act.gated ? 2 * F : F; }
  // Row of w_in (and column of h) of gate f is f * gate_step(); its up row lies up_shift() further.
  MOEFFN_SMALL int64_t gate_step() const { return act.gated && interleaved ? 2 : 1; }
  MOEFFN_SMALL int64_t up_shift() const { return interleaved ? 1 : F; }
};

// Which rows an expert owns and where they come from; see moeffn.types.Plan.
struct Plan {
  int64_t K = 1;
  const int32_t* offsets = nullptr;      // (E + 1,)
  const int32_t* slot_of_row = nullptr;  // (N,), nullptr: row r is slot r
  const int32_t* row_of_slot = nullptr;  // (N,), nullptr: slot s is row s
};

// A router's logits: x (T, D) of any dtype, contiguous, w (C, D) with rows whose elements lie side by side, b (C,).
struct Scores {
  int64_t T = 0, D = 0, C = 0;
  Array x, w, b;
  float* out = nullptr;  // (T, C)
};

struct Forward {
  int64_t T = 0;
  Array x;                          // (T, D)
  Plan plan;
  const float* weights = nullptr;   // (T, K) contiguous, nullptr: all ones
  bool apply_to_input = false;      // weights scale what enters the expert
  void* y = nullptr;                // (T, D) contiguous, dtype of x, overwritten
  // In place of y: called once, by the caller's thread, while others begin. Sets y; false: the call is given up.
  bool (*make_y)(void* maker, void** y) = nullptr;
  void* maker = nullptr;
  void* h = nullptr;                // (T * K, 2F | F) contiguous, dtype of x, in row order; nullptr: not wanted
  const Experts* shared = nullptr;  // a dense FFN (E = 1) over every token, added to the sum; nullptr: none
  const float* shared_gate = nullptr;  // (T,), nullptr: ones
};

}  // namespace moeffn
