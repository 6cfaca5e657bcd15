#include "forward.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels.h"
#include "scratch.h"
#include "threads.h"

namespace moeffn {
namespace {

// Most memory of a pass for activations and what experts give, whatever the routing. When it is not enough for both, the
// activations of a few blocks at a time are kept beside all that experts give; else what experts give is made and summed
// strip by strip of its columns; when a strip would be too narrow, the tokens are taken in several passes, each of which
// reads the weights again. A tile of at most 4 MiB per thread comes on top.
constexpr int64_t kMostScratch = int64_t{54} << 20;
constexpr int64_t kLeastStrip = 128;
// Tasks wanted per thread and phase: fewer lose to imbalance, more to packing the same rows again.
constexpr int64_t kTasksPerThread = 8;
// Hidden units and columns of a task are a multiple of this many.
constexpr int64_t kUnit = 32;
// Elements of weights that a down projection's task has at least, where there are several.
constexpr int64_t kLeastWeights = 1 << 17;
// Reading an expert's weights costs about as much as multiplying this many rows by them.
constexpr int64_t kReadRows = 16;
constexpr int64_t kCombineTokens = 16;  // at most
// Below this many multiply-adds a call runs on the caller's thread alone.
constexpr int64_t kSmallWork = 1 << 16;

struct Task {
  enum Kind : int32_t { up, down, sum } kind;
  int32_t index;     // of the block; of the strip for a sum
  int64_t from, to;  // hidden units, columns, tokens
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

// Adds tasks for [from, to) in so many parts of whole units; returns their number.
int64_t cut(std::vector<Task>& tasks, Task::Kind kind, size_t index, int64_t from, int64_t to, int64_t parts, int64_t unit) {
  const int64_t units = (to - from + unit - 1) / unit;
  parts = std::max<int64_t>(1, std::min(parts, units));
  for (int64_t i = 0; i < parts; ++i)
    tasks.push_back({kind, static_cast<int32_t>(index), from + units * i / parts * unit,
                     std::min(to, from + units * (i + 1) / parts * unit)});
  return parts;
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
    y_made_.reset(call.make_y ? 1 : 0);
  }

  void run() {
    if (direct_ || call_.T == 0) begin();
    for (int64_t t0 = 0, n = call_.T; t0 < call_.T && !given_up_; t0 += n) {
      n = std::min(n, call_.T - t0);
      while (!fits(t0, n) && n > 1) n = (n + 1) / 2;
      if (width_ == 0) width_ = sum_.D;
      pass(t0, n);
    }
  }

 private:
  // Makes y, where that is still to do.
  void begin() {
    if (y_made_.ready()) return;
    void* y = nullptr;
    given_up_ = !call_.make_y(call_.maker, &y);
    sum_.y = static_cast<char*>(y);
    y_made_.done();
  }

  // Bytes of a column of what the routed experts, and the shared one, give to so many tokens.
  int64_t routed_column(int64_t tokens) const { return direct_ ? 0 : tokens * sum_.K * size_of(sum_.dtype); }
  int64_t shared_column(int64_t tokens) const { return parts_.size() > 1 ? tokens * size_of(sum_.dtype) : 0; }

  // The width of the strips that so many bytes hold; 0 when they are too few.
  int64_t strip_width(int64_t tokens, int64_t bytes) const {
    const int64_t column = routed_column(tokens) + shared_column(tokens);
    if (sum_.D * column <= bytes) return sum_.D;
    const int64_t most = std::max<int64_t>(bytes, 0) / (2 * column) / kUnit * kUnit;
    if (most < kLeastStrip) return 0;
    const int64_t strips = (sum_.D + most - 1) / most;
    return ((sum_.D + strips - 1) / strips + kUnit - 1) / kUnit * kUnit;
  }

  int64_t act_of(const Block& b) const { return (k_.act_bytes(parts_[b.part], b.rows) + 63) / 64 * 64; }

  // Finds a place for the activations of so many blocks at a time: block i takes that of block i - kept. Returns the bytes.
  int64_t place_acts(size_t kept) {
    kept_ = kept;
    places_.assign(kept + 1, 0);
    for (size_t i = 0; i < blocks_.size(); ++i) places_[i % kept + 1] = std::max(places_[i % kept + 1], act_of(blocks_[i]));
    for (size_t i = 0; i < kept; ++i) places_[i + 1] += places_[i];
    return act_bytes_ = places_[kept];
  }

  // Fills blocks_ for tokens [t0, t0 + n), largest first, places their activations and sets width_; true if the pass's memory
  // stays within the limit.
  bool fits(int64_t t0, int64_t n) {
    blocks_.clear();
    const bool all = n == call_.T;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const int64_t K = parts_[i].plan.K;
      add_blocks(parts_[i], static_cast<int>(i), t0 * K, (t0 + n) * K, all, k_, blocks_);
    }
    std::stable_sort(blocks_.begin(), blocks_.end(),
                     [&](const Block& a, const Block& b) { return cost(parts_[a.part], a) > cost(parts_[b.part], b); });
    local_bytes_ = 0;
    for (const Block& b : blocks_)
      local_bytes_ = std::max(local_bytes_, static_cast<int64_t>(k_.local_bytes(parts_[b.part], b.rows)));
    place_acts(blocks_.size());
    width_ = strip_width(n, kMostScratch - act_bytes_ - 256);
    if (width_ == sum_.D) return true;
    const int64_t room = kMostScratch - sum_.D * (routed_column(n) + shared_column(n)) - 256;
    const size_t least = static_cast<size_t>(threads_) + 1;
    for (size_t kept = std::min<size_t>(blocks_.size(), 8 * least); kept >= least; --kept)
      if (place_acts(kept) <= room) {
        width_ = sum_.D;
        return true;
      }
    place_acts(blocks_.size());
    return width_ > 0;
  }

  void pass(int64_t t0, int64_t n) {
    int64_t total = 0;
    for (const Block& b : blocks_) total += cost(parts_[b.part], b);
    const int threads = total < kSmallWork ? 1 : threads_;

    const int64_t strips = (sum_.D + width_ - 1) / width_;
    const size_t kept = kept_;
    Carver sizes(nullptr);
    auto carve = [&](Carver& c) {
      char* act = c.take<char>(static_cast<size_t>(act_bytes_));
      auto outs = [&](int64_t column, int64_t first) {
        const int64_t bytes = (column * width_ + 63) / 64 * 64;
        return Outs{c.take<char>(static_cast<size_t>(strips > 1 ? 2 * bytes : bytes)), first, width_, bytes};
      };
      sum_.out = parts_[0].out = direct_ ? Outs{sum_.y, 0, width_, 0} : outs(routed_column(n), t0 * sum_.K);
      if (parts_.size() > 1) sum_.shared = parts_[1].out = outs(shared_column(n), t0);
      for (size_t i = 0; i < blocks_.size(); ++i) blocks_[i].act = act + places_[i % kept_];
      return c.take<char>(static_cast<size_t>(local_bytes_ * threads));
    };
    carve(sizes);
    Scratch scratch(sizes.used());
    Carver real(scratch.data());
    char* locals = carve(real);

    tasks_.clear();
    std::unique_ptr<Latch[]> ups(new Latch[blocks_.size()]), acts(new Latch[blocks_.size()]);
    std::unique_ptr<Latch[]> downs(new Latch[strips]), sums(new Latch[strips]);
    const int64_t share = std::max<int64_t>(1, total / (threads * kTasksPerThread));
    auto parts = [&](size_t i) { return threads == 1 ? 1 : (cost(parts_[blocks_[i].part], blocks_[i]) + share - 1) / share; };
    int64_t rest = total;  // of the down projections, those without a task
    // Tasks shrink towards the end, so that no thread waits long for another's last one.
    auto add_down = [&](size_t i, int64_t s) {
      const Part& part = parts_[blocks_[i].part];
      const int64_t to = std::min(sum_.D, (s + 1) * width_), column = std::max<int64_t>(1, cost(part, blocks_[i]) / sum_.D);
      int64_t n = 0;
      for (int64_t d = s * width_, width; d < to; d += width, ++n) {
        const int64_t most = std::max({std::min(share, rest / (2 * threads)) / column, kLeastWeights / part.w->F, int64_t{1}});
        const int64_t pieces = threads == 1 ? 1 : (to - d + most - 1) / most;
        width = std::min(to - d, ((to - d) / pieces + kUnit - 1) / kUnit * kUnit);
        tasks_.push_back({Task::down, static_cast<int32_t>(i), d, d + width});
        rest -= width * column;
      }
      if (kept < blocks_.size()) acts[i].reset(n);
      return n;
    };
    int64_t made = 0;
    size_t next = 0;
    // Where the memory of activations is used again, their down projections come so early that nobody waits for them.
    const size_t behind = kept == blocks_.size() ? kept : kept > static_cast<size_t>(threads) + 1 ? kept - threads : 1;
    for (size_t i = 0; i < blocks_.size(); ++i) {
      if (i >= behind) made += add_down(next++, 0);
      ups[i].reset(cut(tasks_, Task::up, i, 0, parts_[blocks_[i].part].w->F, parts(i), kUnit));
    }
    const int64_t together = std::min(kCombineTokens, (n + threads - 1) / threads);
    for (int64_t s = 0; s <= strips; ++s) {  // a strip is summed after the next one was handed out
      for (; s < strips && next < blocks_.size(); ++next) made += add_down(next, s);
      if (s < strips) downs[s].reset(made);
      made = 0;
      next = 0;
      if (s > 0)
        sums[s - 1].reset(cut(tasks_, Task::sum, static_cast<size_t>(s - 1), t0, t0 + n, n, together));
    }
    Claims claims(static_cast<int64_t>(tasks_.size()));

    parallel(threads, [&](int thread, int) {
      Local local;
      local.data = locals + local_bytes_ * thread;
      if (thread == 0) begin();
      if (thread == 0 && given_up_) claims.stop();
      for (int64_t i = claims.next(); i >= 0; i = claims.next()) {
        const Task& task = tasks_[i];
        if (task.kind == Task::sum) {
          const int64_t d = task.index * width_;
          downs[task.index].wait();
          y_made_.wait();
          if (!given_up_) k_.combine(sum_, task.from, task.to, d, std::min(sum_.D, d + width_));
          sums[task.index].done();
          continue;
        }
        const Block& block = blocks_[task.index];
        const Part& part = parts_[block.part];
        if (task.kind == Task::up) {
          if (static_cast<size_t>(task.index) >= kept) acts[task.index - kept_].wait();
          k_.up(part, block, task.from, task.to, local);
          ups[task.index].done();
        } else {
          const int64_t strip = task.from / width_;
          ups[task.index].wait();
          if (strip > 1) sums[strip - 2].wait();
          k_.down(part, block, task.from, task.to, local);
          if (kept < blocks_.size()) acts[task.index].done();
          downs[strip].done();
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
  size_t kept_ = 0;  // blocks whose activations are kept at a time
  std::vector<int64_t> places_;  // where the activations of block i % kept_ start
  int64_t width_ = 0;  // columns of a strip
  Sum sum_;
  Latch y_made_;
  bool given_up_ = false;  // no y: nothing is to be written
};

}  // namespace

const char* forward(const Experts& w, const Forward& call, Isa isa) {
  const Kernels* k = pick_kernels(isa, call.x.dtype, w.w_in.dtype);
  Call(w, call, *k).run();
  return k->name;
}

}  // namespace moeffn
