// What one instruction set offers. The driver (forward.cpp) cuts a call into tasks; a table's functions do them.
#pragma once
#include <cstddef>

#include "cpu.h"
#include "problem.h"

namespace moeffn {

// What experts give, (slots, D) in the dtype of x, in strips of `width` columns. There is room for one strip that holds all
// columns, or for two strips, which the even and the odd ones use in turn.
struct Outs {
  char* data = nullptr;
  int64_t first = 0;  // the slot that they start with
  int64_t width = 0;
  int64_t odd = 0;    // bytes from the even strips to the odd ones

  // Column d of a slot; the slots' rows, and the columns up to the strip's end, lie side by side.
  template <class XT>
  MOEFFN_SMALL XT* at(int64_t slot, int64_t d) const {
    const int64_t strip = d / width;
    return reinterpret_cast<XT*>(data + strip % 2 * odd) + (slot - first) * width + d - strip * width;
  }
};

// One FFN inside a call: the routed experts, or the shared one.
struct Part {
  const Experts* w = nullptr;
  Array x;
  Plan plan;
  const float* in_scale = nullptr;   // (T, K): scales what enters an expert; nullptr: ones
  const float* out_scale = nullptr;  // (T, K): scales what leaves it; nullptr: ones, or combine does it
  Outs out;
  void* h = nullptr;                 // as Forward::h
};

// Rows [row, row + rows) of one expert: as many as one tile of activations holds.
struct Block {
  int64_t expert = 0, row = 0, rows = 0;
  int part = 0;
  char* act = nullptr;  // act(H) of these rows, in the kernel's own layout
};

// A thread's working memory. `tile_of` says which block's rows of x are packed in it.
struct Local {
  char* data = nullptr;
  const Block* tile_of = nullptr;
};

struct Sum {
  int64_t D = 0, K = 1;
  DType dtype = DType::f32;
  Outs out;
  const int32_t* row_of_slot = nullptr;  // negative: the slot adds nothing; nullptr: slot s is row s
  int64_t rows = 0;                      // rows from here on belong to no expert
  const float* weights = nullptr;        // (T, K), nullptr: ones
  Outs shared;                           // a slot for each token; data == nullptr: none
  const float* shared_gate = nullptr;    // (T,), nullptr: ones
  bool only_dropped = false;             // K = 1 and out is y already: fill in zeros where there is no row
  char* y = nullptr;                     // (T, D)
};

struct Kernels {
  // Bytes of Block::act for so many rows.
  int64_t (*act_bytes)(const Part&, int64_t rows);
  // Most rows in a block, and the bytes of Local::data for blocks of so many rows.
  int64_t (*max_rows)(const Part&);
  size_t (*local_bytes)(const Part&, int64_t rows);
  // act(x · w_inᵀ + b_in) for columns [f0, f1); multiples of 32, or F. Also writes h when wanted.
  void (*up)(const Part&, const Block&, int64_t f0, int64_t f1, Local&);
  // out = act · w_outᵀ + b_out for columns [d0, d1) of one strip, multiples of 32, or D.
  void (*down)(const Part&, const Block&, int64_t d0, int64_t d1, Local&);
  // y[t] = sum over k, in slot order, of weights[t, k] * out[row]; then the shared expert's row: columns [d0, d1) of one
  // strip.
  void (*combine)(const Sum&, int64_t t0, int64_t t1, int64_t d0, int64_t d1);
  const char* name;
  // A router's logits for classes [c0, c1). `tile` has room for T rows of D + 32 floats; `fill`: x is not in it yet.
  void (*logits)(const Scores&, int64_t c0, int64_t c1, float* tile, bool fill);
};

// What the machine can do at most (probe.h): FLOPs of a loop in registers for fp32 and bf16, and a plain read.
struct Probe {
  double (*float_macs)(int64_t rounds, float seed, float* sink);
  double (*pair_macs)(int64_t rounds, float seed, float* sink);
  float (*read)(const char*, int64_t bytes);
};
const Probe* probe_portable();
#if defined(__x86_64__)
const Probe* probe_avx2();
const Probe* probe_avx512();
const Probe* probe_avx512_bf16();
const Probe* probe_amx();
#endif

inline const Probe* pick_probe(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::amx: return probe_amx();
    case Isa::avx512_bf16: return probe_avx512_bf16();
    case Isa::avx512: return probe_avx512();
    case Isa::avx2: return probe_avx2();
    default: break;
  }
#endif
  (void)isa;
  return probe_portable();
}

// The table for a call, by instruction set and the dtypes of x and the weights.
const Kernels* kernels_portable(DType x, DType w);
#if defined(__x86_64__)
const Kernels* kernels_avx2(DType x, DType w);
const Kernels* kernels_avx512(DType x, DType w);
const Kernels* kernels_avx512_bf16(DType x, DType w);
const Kernels* kernels_amx(DType x, DType w);
#endif

inline const Kernels* pick_kernels(Isa isa, DType x, DType w) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::amx: return kernels_amx(x, w);
    case Isa::avx512_bf16: return kernels_avx512_bf16(x, w);
    case Isa::avx512: return kernels_avx512(x, w);
    case Isa::avx2: return kernels_avx2(x, w);
    default: break;
  }
#endif
  (void)isa;
  return kernels_portable(x, w);
}

}  // namespace moeffn
