#include "backward.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "backward_kernels.h"
#include "pages.h"
#include "scratch.h"
#include "threads.h"

namespace moeffn {
namespace {

// Weights are packed in pieces of so many words by so many columns (512 KiB), which stay in L2; rows of 1 KiB and more
// are read at the speed of memory, and a panel of 32 rows of so many words stays in L1.
constexpr int64_t kPieceWords = 256;
constexpr int64_t kPieceColumns = 512;
constexpr int64_t kBlockBytes = 2048 << 10;  // packed rows of x or dy
constexpr int64_t kTasksPerThread = 6;
constexpr int64_t kMaxPanel = 1024;        // hidden units of one task
constexpr int64_t kMaxPartialPanel = 512;  // the same while sums of an expert of many rows wait in fp32

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

const BackwardKernels* pick(Isa isa, DType x, DType w) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::amx: return backward_amx(x, w);
    case Isa::avx512_bf16: return backward_avx512_bf16(x, w);
    case Isa::avx512: return backward_avx512(x, w);
    case Isa::avx2: return backward_avx2(x, w);
    default: break;
  }
#endif
  (void)isa;
  return backward_portable(x, w);
}

// Columns [begin, end) of some rows of one expert; rows: how many rows that expert has. An expert without rows: cleared.
struct Task {
  int64_t expert, rows, begin, end;
};

struct Kept {
  explicit Kept(size_t bytes) : pages(pages_take(bytes)) {}
  ~Kept() { pages_give(pages); }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  const Pages pages;
};

class Pass {
 public:
  Pass(const Experts& experts, const Backward& call)
      : w_(experts), c_(call), k_(*pick(chosen_isa(), call.dy.dtype, experts.w_in.dtype)), threads_(max_threads()) {
    D_ = w_.D;
    F_ = w_.F;
    H_ = w_.in_rows();
    N_ = c_.T * c_.plan.K;
    elem_ = k_.pairs ? 2 : 4;
    want_dh_ = c_.dx || c_.w_in.data || c_.b_in.data || (c_.dweights && c_.apply_to_input);
    want_da_ = want_dh_ || c_.dweights;
    want_rows_ = c_.dx || (c_.dweights && c_.apply_to_input);
    chunk_f_ = chunk(F_);
    chunk_d_ = chunk(D_);
    dots_per_row_ = c_.apply_to_input ? ceil_div(D_, chunk_d_) : ceil_div(F_, chunk_f_) + 1;
    for (int64_t e = 0; e < w_.E; ++e) max_rows_ = std::max(max_rows_, rows_of(e));
    block_ = std::min(round_up(max_rows_, 32), std::clamp(kBlockBytes / (elem_ * D_) / 32 * 32, int64_t{64}, int64_t{1024}));
  }

  const char* run() {
    plan_tasks();
    Carver shared(nullptr);
    carve_shared(shared);
    const Kept shared_memory(shared.used());
    Carver real(shared_memory.pages.data);
    carve_shared(real);
    Carver local(nullptr);
    Local unused;
    carve_local(local, unused);
    const size_t local_bytes = local.used() + 4096;
    const Kept local_memory(local_bytes * static_cast<size_t>(threads_));

    auto each = [&](int64_t total, auto&& body) {
      if (total <= 0) return;
      Claims claims(total);
      parallel(static_cast<int>(std::min<int64_t>(threads_, total)), [&](int thread, int) {
        Local mine;
        Carver carver(local_memory.pages.data + local_bytes * static_cast<size_t>(thread));
        carve_local(carver, mine);
        for (int64_t i = claims.next(); i >= 0; i = claims.next()) body(i, mine);
      });
    };
    each(static_cast<int64_t>(hidden_.size()), [&](int64_t i, Local& mine) { hidden(hidden_[static_cast<size_t>(i)], mine); });
    if (want_rows_)
      each(static_cast<int64_t>(inputs_.size()), [&](int64_t i, Local& mine) { inputs(inputs_[static_cast<size_t>(i)], mine); });
    constexpr int64_t kTokens = 16;
    if (c_.dx || c_.dweights)
      each(ceil_div(c_.T, kTokens), [&](int64_t i, Local& mine) {
        for (int64_t t = i * kTokens; t < std::min(c_.T, (i + 1) * kTokens); ++t) token(t, mine);
      });
    return k_.name;
  }

 private:
  struct Local {
    const char **rows, **more;
    float *a, *b, *turned, *da, *sum, *total, *partial_in, *partial_out;
    char *scaled, *copy;
  };

  int64_t rows_of(int64_t e) const { return c_.plan.offsets[e + 1] - c_.plan.offsets[e]; }
  int64_t words(int64_t k) const { return k_.pairs ? (k + 1) / 2 : k; }
  size_t a_floats(int64_t m, int64_t k) const { return static_cast<size_t>(round_up(m, k_.panel) * round_up(words(k), 16)); }
  size_t b_floats(int64_t k, int64_t n) const { return static_cast<size_t>(round_up(n, 32) * round_up(words(k), 16)); }
  int64_t piece() const { return k_.pairs ? 2 * kPieceWords : kPieceWords; }
  // Columns of weights that are packed at a time.
  static int64_t chunk(int64_t columns) {
    return round_up(ceil_div(columns, std::max<int64_t>(1, ceil_div(columns, kPieceColumns))), 32);
  }

  // Large experts are cut along F (or D), so that there are several tasks for each thread; results do not depend on it.
  int64_t panel(int64_t rows, int64_t columns, int64_t step, int64_t most) const {
    const int64_t tasks = ceil_div(rows * threads_ * kTasksPerThread, std::max<int64_t>(N_, 1));
    const int64_t width = round_up(ceil_div(columns, std::max<int64_t>(tasks, 1)), step);
    return std::min(width, std::max(step, most / step * step));
  }

  void plan_tasks() {
    std::vector<int64_t> order;
    for (int64_t e = 0; e < w_.E; ++e) order.push_back(e);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return rows_of(a) > rows_of(b); });
    for (int64_t e : order) {
      const int64_t rows = rows_of(e);
      if (rows == 0) {
        hidden_.push_back({e, 0, 0, 0});
        continue;
      }
      const int64_t f_width = panel(rows, F_, chunk_f_, rows > block_ ? kMaxPartialPanel : kMaxPanel);
      max_panel_ = std::max(max_panel_, std::min(f_width, round_up(F_, 32)));
      for (int64_t f = 0; f < F_; f += f_width) hidden_.push_back({e, rows, f, std::min(F_, f + f_width)});
      const int64_t d_width = panel(rows, D_, chunk_d_, D_);
      for (int64_t d = 0; d < D_; d += d_width) inputs_.push_back({e, rows, d, std::min(D_, d + d_width)});
    }
  }

  void carve_shared(Carver& from) {
    const size_t rows = static_cast<size_t>(w_.E ? c_.plan.offsets[w_.E] : 0);
    dh_ = want_dh_ ? from.take<char>(rows * static_cast<size_t>(H_ * elem_)) : nullptr;
    dx_rows_ = c_.dx ? from.take<char>(rows * static_cast<size_t>(D_ * size_of(c_.dy.dtype))) : nullptr;
    dots_ = c_.dweights ? from.take<float>(rows * static_cast<size_t>(dots_per_row_)) : nullptr;
  }

  void carve_local(Carver& from, Local& to) const {
    const int64_t gated = w_.act.gated ? 2 : 1, panel = max_panel_;
    const int64_t deepest = std::max({D_, H_, block_});
    to.rows = from.take<const char*>(static_cast<size_t>(std::max(deepest, 2 * kMaxPanel) + 64));
    to.more = from.take<const char*>(static_cast<size_t>(block_ + 64));
    to.a = from.take<float>(std::max({a_floats(block_, D_), a_floats(block_, H_), b_floats(block_, D_)}));
    to.b = from.take<float>(std::max(b_floats(piece(), std::max(chunk_f_, chunk_d_)), b_floats(block_, panel)));
    to.turned = from.take<float>(std::max(a_floats(D_, block_), a_floats(gated * panel, block_)));
    to.da = from.take<float>(static_cast<size_t>(round_up(block_, k_.panel) * std::max(chunk_f_, chunk_d_)));
    to.scaled = from.take<char>(static_cast<size_t>(std::max(block_ * panel, c_.apply_to_input ? block_ * D_ : 0) * elem_));
    to.sum = from.take<float>(static_cast<size_t>(std::max(D_, gated * panel) + 64));
    to.total = from.take<float>(static_cast<size_t>(std::max(D_, gated * panel) + 64));
    const bool partial = max_rows_ > block_;
    to.partial_out = from.take<float>(partial && c_.w_out.data ? static_cast<size_t>(D_ * round_up(panel, 32)) : 0);
    to.partial_in = from.take<float>(partial && c_.w_in.data ? static_cast<size_t>(gated * panel * round_up(D_, 32)) : 0);
    const bool strange = (w_.w_in.s1 != 1 && w_.w_in.s2 != 1) || (w_.w_out.s1 != 1 && w_.w_out.s2 != 1);
    to.copy = from.take<char>(strange ? static_cast<size_t>(piece() * std::max(chunk_f_, chunk_d_) * 4) : 0);
  }

  // mine.da (rows, columns n0..n1) = rows packed in mine.a (rows, depth) times one expert's matrix (depth, columns).
  void multiply(const Array& w, int64_t e, int64_t depth, int64_t n0, int64_t n1, int64_t rows, Local& mine) const {
    for (int64_t k = 0; k < depth; k += piece()) {
      const int64_t deep = std::min(piece(), depth - k);
      pack_weights(w, e, k, k + deep, n0, n1, mine);
      k_.product(mine.a + words(k) * k_.panel, words(depth), rows, mine.b, n1 - n0, words(deep), k > 0, mine.da,
                 round_up(n1 - n0, 32));
    }
  }

  // B = rows [k0, k1) and columns [n0, n1) of one expert's matrix, packed.
  void pack_weights(const Array& w, int64_t e, int64_t k0, int64_t k1, int64_t n0, int64_t n1, Local& mine) const {
    const int64_t n = n1 - n0, depth = k1 - k0;
    if (w.s2 == 1) {
      for (int64_t i = 0; i < depth; ++i) mine.rows[i] = static_cast<const char*>(w.at(e, k0 + i, n0));
      k_.pack_b({mine.rows, depth, w.dtype}, n, mine.b);
    } else if (w.s1 == 1) {
      for (int64_t i = 0; i < n; ++i) mine.rows[i] = static_cast<const char*>(w.at(e, k0, n0 + i));
      k_.pack_b_turned({mine.rows, n, w.dtype}, depth, mine.b);
    } else {
      const int64_t size = size_of(w.dtype);
      for (int64_t i = 0; i < depth; ++i) {
        char* to = mine.copy + i * n * size;
        mine.rows[i] = to;
        for (int64_t j = 0; j < n; ++j)
          std::memcpy(to + j * size, w.at(e, k0 + i, n0 + j), static_cast<size_t>(size));
      }
      k_.pack_b({mine.rows, depth, w.dtype}, n, mine.b);
    }
  }

  int64_t token_of(int64_t row) const {
    return (c_.plan.slot_of_row ? c_.plan.slot_of_row[row] : row) / c_.plan.K;
  }
  float weight_of(int64_t row) const { return c_.weights[c_.plan.slot_of_row ? c_.plan.slot_of_row[row] : row]; }
  float scale_of(int64_t row) const { return c_.apply_to_input ? 1.0f : weight_of(row); }
  char* dh_at(int64_t row, int64_t column) const { return dh_ + (row * H_ + column) * elem_; }

  // Everything that hidden units [begin, end) of one expert give: their columns of dH, dW_out and rows of dW_in.
  void hidden(const Task& task, Local& mine) const {
    if (task.rows == 0) return clear(task.expert);
    const int64_t e = task.expert, width = task.end - task.begin, first = c_.plan.offsets[e];
    // The panel's columns of H: one run, or a run of gates and a run of ups.
    const int64_t step = w_.gate_step(), runs = w_.act.gated && !w_.interleaved ? 2 : 1, run = width * step;
    for (int64_t m = 0; m < task.rows; m += block_) {
      const int64_t rows = std::min(block_, task.rows - m), row = first + m;
      const bool last = m + rows == task.rows;
      hidden_rows(task, row, rows, mine);
      auto sink = [&](const Target& t, int64_t at, int64_t ld, float* partial) {
        GradSink to;
        to.out = t.at(at);
        to.dtype = t.dtype;
        to.ld = ld;
        to.add = t.add;
        if (m > 0 || !last) to.partial = partial;
        to.load_partial = m > 0;
        to.keep_partial = !last;
        return to;
      };
      if (c_.w_out.data) {
        const char** dy = gather(c_.dy, row, rows, mine.more);
        k_.pack_a_turned({dy, rows, c_.dy.dtype}, D_, mine.turned);
        for (int64_t i = 0; i < rows; ++i) mine.rows[i] = mine.scaled + i * width * elem_;
        k_.pack_b({mine.rows, rows, element()}, width, mine.b);
        k_.product_grad(mine.turned, D_, mine.b, width, words(rows),
                        sink(c_.w_out, e * D_ * F_ + task.begin, F_, mine.partial_out));
      }
      if (c_.w_in.data) {
        pack_inputs(row, rows, mine);
        for (int64_t r = 0; r < runs; ++r) {
          const int64_t column = task.begin * step + r * F_;
          for (int64_t i = 0; i < rows; ++i) mine.rows[i] = dh_at(row + i, column);
          k_.pack_a_turned({mine.rows, rows, element()}, run, mine.turned);
          k_.product_grad(mine.turned, run, mine.a, D_, words(rows),
                          sink(c_.w_in, (e * H_ + column) * D_, D_, mine.partial_in + r * run * round_up(D_, 32)));
        }
      }
    }
    if (c_.b_in.data)
      for (int64_t r = 0; r < runs; ++r) {
        const int64_t column = task.begin * step + r * F_;
        column_sum(task.rows, run, c_.b_in, e * H_ + column, mine, [&](int64_t i, float* sum) {
          k_.add_row(dh_at(first + i, column), element(), run, 1.0f, sum);
        });
      }
    if (c_.b_out.data && task.begin == 0)
      column_sum(task.rows, D_, c_.b_out, e * D_, mine, [&](int64_t i, float* sum) {
        k_.add_row(row_at(c_.dy, token_of(first + i)), c_.dy.dtype, D_, scale_of(first + i), sum);
      });
  }

  // Sums of 64 rows, then of those sums: the error of one long sum would grow with its length.
  template <class Add>
  void column_sum(int64_t rows, int64_t n, const Target& to, int64_t at, Local& mine, const Add& add) const {
    std::fill_n(mine.total, n, 0.0f);
    for (int64_t i = 0; i < rows; i += 64) {
      std::fill_n(mine.sum, n, 0.0f);
      for (int64_t j = i; j < std::min(rows, i + 64); ++j) add(j, mine.sum);
      k_.add_row(reinterpret_cast<const char*>(mine.sum), DType::f32, n, 1.0f, mine.total);
    }
    k_.write_row(mine.total, n, 1.0f, to.at(at), to.dtype, to.add);
  }

  // dH, scaled activations and dots of some rows and the task's hidden units.
  void hidden_rows(const Task& task, int64_t row, int64_t rows, Local& mine) const {
    const int64_t step = w_.gate_step(), width = task.end - task.begin;
    if (want_da_) k_.pack_a({gather(c_.dy, row, rows, mine.more), rows, c_.dy.dtype}, D_, mine.a);
    for (int64_t f = task.begin; f < task.end; f += chunk_f_) {
      const int64_t n = std::min(chunk_f_, task.end - f);
      if (want_da_) multiply(w_.w_out, task.expert, D_, f, f + n, rows, mine);
      if (!want_dh_ && !c_.w_out.data && !c_.dweights) continue;
      for (int64_t i = 0; i < rows; ++i) {
        const char* h = static_cast<const char*>(c_.h) + (row + i) * H_ * size_of(c_.dy.dtype);
        ActRow a;
        a.act = &w_.act;
        a.interleaved = w_.interleaved;
        a.h_dtype = c_.dy.dtype;
        a.gate = h + f * step * size_of(c_.dy.dtype);
        a.up = h + (f + F_) * size_of(c_.dy.dtype);
        a.da = want_da_ ? mine.da + i * round_up(n, 32) : nullptr;
        a.scale = scale_of(row + i);
        if (want_dh_) {
          a.d_gate = dh_at(row + i, f * step);
          a.d_up = dh_at(row + i, f + F_);
        }
        if (c_.w_out.data) a.scaled = mine.scaled + (i * width + f - task.begin) * elem_;
        const float dot = k_.act_row(a, n);
        if (c_.dweights && !c_.apply_to_input) dots_[(row + i) * dots_per_row_ + f / chunk_f_] = dot;
      }
    }
    if (c_.dweights && !c_.apply_to_input && task.begin == 0)
      for (int64_t i = 0; i < rows; ++i)
        dots_[(row + i) * dots_per_row_ + dots_per_row_ - 1] =
            w_.b_out.data ? k_.dot_row(row_at(c_.dy, token_of(row + i)), c_.dy.dtype,
                                       static_cast<const char*>(w_.b_out.at(task.expert)), w_.b_out.dtype, D_)
                          : 0.0f;
  }

  // B = rows of x as the expert saw them.
  void pack_inputs(int64_t row, int64_t rows, Local& mine) const {
    const char** x = gather(c_.x, row, rows, mine.more);
    if (!c_.apply_to_input) return k_.pack_b({x, rows, c_.x.dtype}, D_, mine.a);
    for (int64_t i = 0; i < rows; ++i) {
      char* to = mine.scaled + i * D_ * elem_;
      k_.scale_row(x[i], c_.x.dtype, D_, weight_of(row + i), to);
      x[i] = to;
    }
    k_.pack_b({x, rows, element()}, D_, mine.a);
  }

  // Columns [begin, end) of one expert's rows of dX.
  void inputs(const Task& task, Local& mine) const {
    const int64_t size = size_of(c_.dy.dtype);
    for (int64_t m = 0; m < task.rows; m += block_) {
      const int64_t rows = std::min(block_, task.rows - m), row = c_.plan.offsets[task.expert] + m;
      for (int64_t i = 0; i < rows; ++i) mine.rows[i] = dh_at(row + i, 0);
      k_.pack_a({mine.rows, rows, element()}, H_, mine.a);
      for (int64_t d = task.begin; d < task.end; d += chunk_d_) {
        const int64_t n = std::min(chunk_d_, task.end - d);
        multiply(w_.w_in, task.expert, H_, d, d + n, rows, mine);
        for (int64_t i = 0; i < rows; ++i) {
          const float* c = mine.da + i * round_up(n, 32);
          const float scale = c_.apply_to_input ? weight_of(row + i) : 1.0f;
          if (c_.dx) k_.write_row(c, n, scale, dx_rows_ + ((row + i) * D_ + d) * size, c_.dy.dtype, false);
          if (c_.apply_to_input && c_.dweights)
            dots_[(row + i) * dots_per_row_ + d / chunk_d_] =
                k_.dot_row(reinterpret_cast<const char*>(c), DType::f32, row_at(c_.x, token_of(row + i)) + d * size,
                           c_.x.dtype, n);
        }
      }
    }
  }

  // Sums of one token over its slots, in slot order.
  void token(int64_t t, Local& mine) const {
    const int64_t K = c_.plan.K, size = size_of(c_.dy.dtype);
    if (c_.dx) std::fill_n(mine.sum, D_, 0.0f);
    for (int64_t s = t * K; s < (t + 1) * K; ++s) {
      int64_t row = c_.plan.row_of_slot ? c_.plan.row_of_slot[s] : s;
      if (row >= c_.plan.offsets[w_.E]) row = -1;
      if (c_.dx && row >= 0) k_.add_row(dx_rows_ + row * D_ * size, c_.dy.dtype, D_, 1.0f, mine.sum);
      if (!c_.dweights) continue;
      float sum = 0.0f;
      for (int64_t i = 0; row >= 0 && i < dots_per_row_; ++i) sum += dots_[row * dots_per_row_ + i];
      c_.dweights[s] = sum;
    }
    if (c_.dx) k_.write_row(mine.sum, D_, 1.0f, static_cast<char*>(c_.dx) + t * D_ * size, c_.dy.dtype, false);
  }

  void clear(int64_t e) const {
    auto zero = [&](const Target& t, int64_t n) {
      if (t.data && !t.add && !t.zeroed) k_.clear(t.at(e * n), static_cast<size_t>(n * size_of(t.dtype)));
    };
    zero(c_.w_in, H_ * D_);
    zero(c_.w_out, D_ * F_);
    zero(c_.b_in, H_);
    zero(c_.b_out, D_);
  }

  DType element() const { return k_.pairs ? DType::bf16 : DType::f32; }
  static const char* row_at(const Array& a, int64_t i) { return static_cast<const char*>(a.at(i)); }
  const char** gather(const Array& a, int64_t row, int64_t rows, const char** to) const {
    for (int64_t i = 0; i < rows; ++i) to[i] = row_at(a, token_of(row + i));
    return to;
  }

  const Experts& w_;
  const Backward& c_;
  const BackwardKernels& k_;
  const int threads_;
  int64_t D_, F_, H_, N_, elem_, chunk_f_, chunk_d_, block_, dots_per_row_, max_rows_ = 0, max_panel_ = 32;
  bool want_dh_, want_da_, want_rows_;
  std::vector<Task> hidden_, inputs_;
  char *dh_ = nullptr, *dx_rows_ = nullptr;
  float* dots_ = nullptr;
};

}  // namespace

const char* backward(const Experts& experts, const Backward& call) { return Pass(experts, call).run(); }

}  // namespace moeffn
