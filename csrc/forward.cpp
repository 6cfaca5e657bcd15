#include "forward.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels.h"
#include "scratch.h"
#include "threads.h"

namespace moeffn {
namespace {

// Most memory of a pass for what experts give, whatever the routing: when it is not enough, the tokens are taken in
// several passes. A tile of at most 4 MiB per thread comes on top.
constexpr int64_t kMostScratch = int64_t{52} << 20;
// Tasks wanted per thread and phase: fewer lose to imbalance, more to packing the same rows again.
constexpr int64_t kTasksPerThread = 8;
// Reading an expert's weights costs about as much as multiplying this many rows by them.
constexpr int64_t kReadRows = 16;
constexpr int64_t kCombineTokens = 16;
// Below this many multiply-adds a call runs on the caller's thread alone.
constexpr int64_t kSmallWork = 1 << 16;

struct Task {
  int32_t block;
  bool is_down;
  int64_t from, to;
};

// The blocks of one part that hold slots [s0, s1).
void add_blocks(const Part& part, int index, int64_t s0, int64_t s1, bool all, const Kernels& k, std::vector<Block>& out) {
  const int64_t most = k.max_rows(part);
  const int32_t* slots = part.plan.slot_of_row;
  for (int64_t e = 0; e < part.w->E; ++e) {
    int64_t lo = part.plan.offsets[e], hi = part.plan.offsets[e + 1];
    if (lo >= hi) continue;
    if (!all && slots) {  // slots ascend inside an expert
      const int64_t from = std::lower_bound(slots + lo, slots + hi, s0) - slots;
      hi = std::lower_bound(slots + lo, slots + hi, s1) - slots;
      lo = from;
    } else if (!all) {
      lo = std::max(lo, s0);
      hi = std::min(hi, s1);
    }
    const int64_t n = hi - lo;
    if (n <= 0) continue;
    const int64_t pieces = (n + most - 1) / most;
    for (int64_t i = 0; i < pieces; ++i) {
      Block b;
      b.expert = e;
      b.part = index;
      b.row = lo + n * i / pieces;
      b.rows = lo + n * (i + 1) / pieces - b.row;
      out.push_back(b);
    }
  }
}

int64_t cost(const Part& p, const Block& b) { return (b.rows + kReadRows) * p.w->F * p.w->D; }

void cut(std::vector<Task>& tasks, int32_t block, bool is_down, int64_t n, int64_t parts, int64_t step) {
  const int64_t units = (n + step - 1) / step;
  parts = std::max<int64_t>(1, std::min(parts, units));
  for (int64_t i = 0; i < parts; ++i)
    tasks.push_back({block, is_down, units * i / parts * step, std::min(n, units * (i + 1) / parts * step)});
}

// One layer's call: the routed experts are part 0, the shared expert part 1.
class Call {
 public:
  Call(const Experts& w, const Forward& call, const Kernels& k) : call_(call), k_(k), threads_(max_threads()) {
    const int64_t K = call.plan.K;
    Part routed;
    routed.w = &w;
    routed.x = call.x;
    routed.plan = call.plan;
    routed.h = call.h;
    routed.in_scale = call.apply_to_input ? call.weights : nullptr;
    direct_ = K == 1 && !call.shared;
    if (direct_ && !call.apply_to_input) routed.out_scale = call.weights;
    parts_.push_back(routed);
    if (call.shared) {
      Part shared;
      shared.w = call.shared;
      shared.x = call.x;
      shared.plan.offsets = all_tokens_;
      all_tokens_[1] = static_cast<int32_t>(call.T);
      parts_.push_back(shared);
    }
    sum_.D = w.D;
    sum_.K = K;
    sum_.dtype = call.x.dtype;
    sum_.row_of_slot = call.plan.row_of_slot;
    sum_.rows = call.plan.offsets[w.E];
    sum_.weights = call.apply_to_input ? nullptr : call.weights;
    sum_.shared_gate = call.shared_gate;
    sum_.only_dropped = direct_;
    sum_.y = static_cast<char*>(call.y);
  }

  void run() {
    for (int64_t t0 = 0, n = call_.T; t0 < call_.T; t0 += n) {
      n = std::min(n, call_.T - t0);
      while (!fits(t0, n) && n > 1) n = (n + 1) / 2;
      pass(t0, n);
    }
  }

 private:
  int64_t out_bytes(int64_t tokens) const {
    const int64_t row = sum_.D * size_of(sum_.dtype);
    return (direct_ ? 0 : tokens * sum_.K * row) + (parts_.size() > 1 ? tokens * row : 0) + 128;
  }

  // Fills blocks_ for tokens [t0, t0 + n); true if the pass's memory stays within the limit.
  bool fits(int64_t t0, int64_t n) {
    blocks_.clear();
    const bool all = n == call_.T;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const int64_t K = parts_[i].plan.K;
      add_blocks(parts_[i], static_cast<int>(i), t0 * K, (t0 + n) * K, all, k_, blocks_);
    }
    act_bytes_ = local_bytes_ = 0;
    for (const Block& b : blocks_) {
      const Part& p = parts_[b.part];
      act_bytes_ += (k_.act_bytes(p, b.rows) + 63) / 64 * 64;
      local_bytes_ = std::max(local_bytes_, static_cast<int64_t>(k_.local_bytes(p, b.rows)));
    }
    return act_bytes_ + out_bytes(n) <= kMostScratch;
  }

  void pass(int64_t t0, int64_t n) {
    std::stable_sort(blocks_.begin(), blocks_.end(),
                     [&](const Block& a, const Block& b) { return cost(parts_[a.part], a) > cost(parts_[b.part], b); });
    int64_t total = 0;
    for (const Block& b : blocks_) total += cost(parts_[b.part], b);
    const int threads = total < kSmallWork ? 1 : threads_;

    Carver sizes(nullptr);
    auto carve = [&](Carver& c) {
      char* act = c.take<char>(static_cast<size_t>(act_bytes_));
      const int64_t row = sum_.D * size_of(sum_.dtype);
      char* out = c.take<char>(static_cast<size_t>(direct_ ? 0 : n * sum_.K * row));
      char* shared = c.take<char>(static_cast<size_t>(parts_.size() > 1 ? n * row : 0));
      parts_[0].out = direct_ ? sum_.y : out;
      parts_[0].first_slot = direct_ ? 0 : t0 * sum_.K;
      sum_.out = out;
      sum_.first_token = t0;
      if (parts_.size() > 1) {
        sum_.shared = parts_[1].out = shared;
        parts_[1].first_slot = t0;
      }
      for (Block& b : blocks_) {
        b.act = act;
        act += (k_.act_bytes(parts_[b.part], b.rows) + 63) / 64 * 64;
      }
      return c.take<char>(static_cast<size_t>(local_bytes_ * threads));
    };
    carve(sizes);
    Scratch scratch(sizes.used());
    Carver real(scratch.data());
    char* locals = carve(real);

    tasks_.clear();
    std::unique_ptr<Latch[]> ups(new Latch[blocks_.size() + 1]);
    const int64_t share = std::max<int64_t>(1, total / (threads * kTasksPerThread));
    for (int phase = 0; phase < 2; ++phase)
      for (size_t i = 0; i < blocks_.size(); ++i) {
        const Part& p = parts_[blocks_[i].part];
        const size_t before = tasks_.size();
        cut(tasks_, static_cast<int32_t>(i), phase == 1, phase ? p.w->D : p.w->F,
            threads == 1 ? 1 : (cost(p, blocks_[i]) + share - 1) / share, k_.f_step);
        if (phase == 0) ups[i].reset(static_cast<int64_t>(tasks_.size() - before));
      }
    const int64_t work = static_cast<int64_t>(tasks_.size());
    int64_t downs = 0;
    for (const Task& t : tasks_) downs += t.is_down;
    Latch all_down;
    all_down.reset(downs);
    const int64_t sums = (n + kCombineTokens - 1) / kCombineTokens;
    Claims claims(work + sums);

    parallel(threads, [&](int thread, int) {
      Local local;
      local.data = locals + local_bytes_ * thread;
      for (int64_t i = claims.next(); i >= 0; i = claims.next()) {
        if (i >= work) {
          all_down.wait();
          const int64_t a = t0 + (i - work) * kCombineTokens;
          k_.combine(sum_, a, std::min(a + kCombineTokens, t0 + n));
          continue;
        }
        const Task& task = tasks_[i];
        const Block& block = blocks_[task.block];
        const Part& part = parts_[block.part];
        if (task.is_down) {
          ups[task.block].wait();
          k_.down(part, block, task.from, task.to, local);
          all_down.done();
        } else {
          k_.up(part, block, task.from, task.to, local);
          ups[task.block].done();
        }
      }
    });
  }

  const Forward& call_;
  const Kernels& k_;
  int threads_;
  bool direct_ = false;  // one slot per token: its row is y's row
  int32_t all_tokens_[2] = {0, 0};
  std::vector<Part> parts_;
  std::vector<Block> blocks_;
  std::vector<Task> tasks_;
  int64_t act_bytes_ = 0, local_bytes_ = 0;
  Sum sum_;
};

}  // namespace

const char* forward(const Experts& w, const Forward& call, Isa isa) {
  const Kernels* k = pick_kernels(isa, call.x.dtype, w.w_in.dtype);
  Call(w, call, *k).run();
  return k->name;
}

}  // namespace moeffn
