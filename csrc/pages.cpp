#include "pages.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace moeffn {
namespace {

constexpr size_t kHuge = size_t{2} << 20;

struct Store {
  std::mutex lock;
  std::vector<Pages> kept;
  size_t held = 0, used = 0, most = 0;
};

// Never destroyed: tensors may be freed after the statics of this module.
Store& store() {
  static Store* it = new Store;
  return *it;
}

#if defined(__linux__)
char* map(size_t bytes) {
  void* p = mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  const uintptr_t at = reinterpret_cast<uintptr_t>(p), aligned = (at + kHuge - 1) / kHuge * kHuge;
  if (aligned > at) munmap(p, aligned - at);
  const size_t tail = kHuge - (aligned - at);
  if (tail) munmap(reinterpret_cast<void*>(aligned + bytes), tail);
  madvise(reinterpret_cast<void*>(aligned), bytes, MADV_HUGEPAGE);  // a wish: small pages serve as well
  return reinterpret_cast<char*>(aligned);
}
void unmap(const Pages& p) noexcept { munmap(p.data, p.bytes); }
#else
char* map(size_t bytes) {
  void* p = std::aligned_alloc(4096, bytes);
  if (!p) throw std::bad_alloc();
  std::fill_n(static_cast<char*>(p), bytes, char{0});
  return static_cast<char*>(p);
}
void unmap(const Pages& p) noexcept { std::free(p.data); }
#endif

size_t keep_at_most() {
  const char* text = std::getenv("MOEFFN_KEEP_MIB");
  return text && *text ? static_cast<size_t>(std::strtoull(text, nullptr, 10)) << 20 : SIZE_MAX;
}

// Bytes that may be kept beside those in use. A quarter beyond the most that was in use at once: rows in flight and
// gradients are in use at different times of a step, and without it they push each other out in every step.
size_t room(const Store& s, size_t used) {
  const size_t limit = s.most + s.most / 4;
  return limit > used ? limit - used : 0;
}

// Until no more than `limit` bytes are kept: each time the smallest buffer that suffices, so that room for a few rows
// does not cost the gradient of a whole layer; else the largest.
void trim(Store& s, size_t limit) noexcept {
  while (s.held > limit && !s.kept.empty()) {
    const size_t excess = s.held - limit;
    auto victim = s.kept.begin();
    for (auto it = victim; it != s.kept.end(); ++it)
      if (victim->bytes < excess ? it->bytes > victim->bytes : it->bytes >= excess && it->bytes < victim->bytes) victim = it;
    unmap(*victim);
    s.held -= victim->bytes;
    s.kept.erase(victim);
  }
}

}  // namespace

Pages pages_take(size_t bytes) {
  bytes = (std::max<size_t>(bytes, 1) + kHuge - 1) / kHuge * kHuge;
  Store& s = store();
  std::lock_guard<std::mutex> guard(s.lock);
  auto best = s.kept.end();
  for (auto it = s.kept.begin(); it != s.kept.end(); ++it)
    if (it->bytes >= bytes && it->bytes <= bytes + bytes / 4 && (best == s.kept.end() || it->bytes < best->bytes)) best = it;
  Pages found;
  if (best != s.kept.end()) {
    found = *best;
    s.held -= found.bytes;
    s.kept.erase(best);
  } else {
    // What is kept and does not fit makes room for what is asked.
    trim(s, room(s, s.used + bytes));
    s.kept.reserve(s.kept.size() + 64);  // so that giving back allocates nothing
    found = Pages{map(bytes), bytes, true};
  }
  s.used += found.bytes;
  s.most = std::max(s.most, s.used);
  return found;
}

void pages_give(const Pages& pages) noexcept {
  Store& s = store();
  std::lock_guard<std::mutex> guard(s.lock);
  s.used -= pages.bytes;
  if (s.kept.size() == s.kept.capacity()) return unmap(pages);
  s.kept.push_back(Pages{pages.data, pages.bytes, false});
  s.held += pages.bytes;
  trim(s, std::min(keep_at_most(), room(s, s.used)));
}

size_t pages_held() {
  Store& s = store();
  std::lock_guard<std::mutex> guard(s.lock);
  return s.held;
}

void pages_release() {
  Store& s = store();
  std::lock_guard<std::mutex> guard(s.lock);
  trim(s, 0);
  s.most = s.used;
}

}  // namespace moeffn
