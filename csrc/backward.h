// Gradients of the expert FFN from what the forward saved: x, the pre-activations H and the routing.
#pragma once
#include <cstdint>

#include "problem.h"

namespace moeffn {

// Where the gradient of one parameter goes: contiguous, of the parameter's shape. data == nullptr: not wanted.
struct Target {
  void* data = nullptr;
  DType dtype = DType::f32;
  bool add = false;     // add to what is there
  bool zeroed = false;  // already all zeros: idle experts need no write

  char* at(int64_t i) const { return static_cast<char*>(data) + i * size_of(dtype); }
};

// Per row r (token t, weight s), with A = act(H) recomputed and dA' = dY_t W_out:
//   ds = <dA', A> + <dY_t, b_out>       dH = s dA' * act'(H)       dX_t = sum over slots, in order, of dH W_in
//   dW_out += (s A)^T dY_t              dW_in += dH^T x_t
// With apply_to_input the expert saw s x_t and s = 1 above: dX_t sums s dH W_in, and ds = <dH W_in, x_t>.
struct Backward {
  int64_t T = 0;
  Array dy;                        // (T, D), dtype of x, s1 == 1
  Array x;                         // (T, D), s1 == 1; only its dtype counts when neither w_in nor input weights ask
  const void* h = nullptr;         // (N, 2F | F) contiguous, dtype of x, in row order
  Plan plan;
  const float* weights = nullptr;  // (T, K) contiguous
  bool apply_to_input = false;
  void* dx = nullptr;              // (T, D) contiguous, dtype of x
  float* dweights = nullptr;       // (T, K) contiguous
  Target w_in, w_out, b_in, b_out;
};

// Deterministic and independent of the number of threads. Working memory: two rows (of 2F and of D) per routed slot,
// and about 20 MiB a thread. Throws BadArgument, std::bad_alloc.
// Returns the name of the kernels that ran.
const char* backward(const Experts& experts, const Backward& call);

}  // namespace moeffn
