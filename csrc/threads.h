// Torch's own OpenMP pool (the module links the same libgomp that torch loaded first), so torch.set_num_threads rules.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <thread>

#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moeffn {

inline int max_threads() {
#ifdef _OPENMP
  return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  return 1;
#endif
}

inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Runs body(thread, threads) on `threads` threads. An exception in any of them is rethrown by the caller's thread.
template <class Body>
void parallel(int threads, const Body& body) {
  if (threads <= 1) {
    body(0, 1);
    return;
  }
#ifdef _OPENMP
  std::exception_ptr error = nullptr;
#pragma omp parallel num_threads(threads)
  {
    try {
      body(omp_get_thread_num(), omp_get_num_threads());
    } catch (...) {
#pragma omp critical(moeffn_error)
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
#else
  body(0, 1);
#endif
}

// Tasks 0..total-1 are claimed one at a time, so that a disturbed core delays one task, not a share of all.
class Claims {
 public:
  explicit Claims(int64_t total) : total_(total) {}
  // The next task, or -1.
  int64_t next() {
    int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
    return i < total_ ? i : -1;
  }
  // No more are handed out.
  void stop() { next_.store(total_, std::memory_order_relaxed); }

 private:
  int64_t total_;
  std::atomic<int64_t> next_{0};
};

// Counts finished tasks. Waiters spin for as long as a decode task may take, then give their core away: whoever yields
// beside a busy process gets the core back a time slice later, 3 ms, which is more than a whole decode call.
class Latch {
 public:
  void reset(int64_t n) { left_.store(n, std::memory_order_relaxed); }
  // True for the one who finished last.
  bool done() { return left_.fetch_sub(1, std::memory_order_acq_rel) == 1; }
  bool ready() const { return left_.load(std::memory_order_acquire) <= 0; }
  void wait() const {
    using Clock = std::chrono::steady_clock;
    constexpr auto kPatience = std::chrono::microseconds(300);
    Clock::time_point start{};
    for (int spin = 1; !ready(); ++spin) {
      pause_cpu();
      if (spin % 64) continue;
      const auto now = Clock::now();
      if (start == Clock::time_point{}) start = now;
      if (now - start > kPatience) std::this_thread::yield();
    }
  }

 private:
  std::atomic<int64_t> left_{0};
};

// body(i) for i in [0, total), claimed dynamically.
template <class Body>
void for_each(int64_t total, int threads, const Body& body) {
  if (total <= 0) return;
  Claims claims(total);
  if (threads > total) threads = static_cast<int>(total);
  parallel(threads, [&](int, int) {
    for (int64_t i = claims.next(); i >= 0; i = claims.next()) body(i);
  });
}

}  // namespace moeffn
