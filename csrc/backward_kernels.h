// What one instruction set offers to the backward. All products are C (M, N) = A (M, K) B (K, N) on packed operands.
//
// A "word" is 32 bits along K: a pair of bf16 where the set multiplies bf16, else one float; "elements" are what words
// are made of. K is padded with zeros to whole blocks of 16 words.
// Packed A: [panel][block][row of the panel][16 words]. Packed B: [column / 32][block][word of the block][32 columns].
#pragma once
#include <cstddef>
#include <cstdint>

#include "cpu.h"
#include "problem.h"

namespace moeffn {

// A matrix by its rows: rows[i] is where row i starts, elements side by side.
struct RowsOf {
  const char* const* rows = nullptr;
  int64_t n = 0;
  DType dtype = DType::f32;
};

// Where tiles of a weight gradient go: out = [out +] [partial +] C; while row blocks remain, partial = [partial +] C.
struct GradSink {
  char* out = nullptr;
  DType dtype = DType::f32;
  int64_t ld = 0;  // elements
  bool add = false;
  float* partial = nullptr;  // (M, N rounded up to 32)
  bool load_partial = false, keep_partial = false;
};

// One row of the activation's backward; columns of a gated row alternate gate, up when interleaved.
struct ActRow {
  const Activation* act = nullptr;
  bool interleaved = false;
  DType h_dtype = DType::f32;
  const char* gate = nullptr;
  const char* up = nullptr;
  const float* da = nullptr;  // dA', nullptr: only `scaled` is wanted
  float scale = 1.0f;
  char* d_gate = nullptr;  // scale * dA' * act', elements
  char* d_up = nullptr;
  char* scaled = nullptr;  // scale * act(H), elements; nullptr: not wanted
};

struct BackwardKernels {
  const char* name;
  bool pairs;     // a word is two bf16
  int64_t panel;  // rows of a panel of A
  void (*pack_a)(const RowsOf&, int64_t k, float* out);         // A = rows (M, k)
  void (*pack_a_turned)(const RowsOf&, int64_t m, float* out);  // A = transpose of rows (K, m)
  void (*pack_b)(const RowsOf&, int64_t n, float* out);         // B = rows (K, n)
  void (*pack_b_turned)(const RowsOf&, int64_t k, float* out);  // B = transpose of rows (N, k)
  // out (M, N) = [out +] A B, where B holds `words` words of K and panels of A lie a_words apart (those of all of K).
  void (*product)(const float* a, int64_t a_words, int64_t m, const float* b, int64_t n, int64_t words, bool add,
                  float* out, int64_t ld);
  void (*product_grad)(const float* a, int64_t m, const float* b, int64_t n, int64_t words, const GradSink&);
  float (*act_row)(const ActRow&, int64_t n);                                            // -> <dA', act(H)>
  void (*scale_row)(const char* row, DType, int64_t n, float scale, char* out);          // elements = scale * row
  void (*add_row)(const char* row, DType, int64_t n, float scale, float* sum);           // sum += scale * row
  float (*dot_row)(const char* a, DType, const char* b, DType, int64_t n);
  void (*write_row)(const float* row, int64_t n, float scale, char* out, DType, bool add);  // out = [out +] scale * row
  void (*clear)(char* to, size_t bytes);                                                 // zeros, past the caches
};

const BackwardKernels* backward_portable(DType x, DType w);
#if defined(__x86_64__)
const BackwardKernels* backward_avx2(DType x, DType w);
const BackwardKernels* backward_avx512(DType x, DType w);
const BackwardKernels* backward_avx512_bf16(DType x, DType w);
const BackwardKernels* backward_amx(DType x, DType w);
#endif

}  // namespace moeffn
