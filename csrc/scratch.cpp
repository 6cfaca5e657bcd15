#include "scratch.h"

#include <cstdlib>
#include <mutex>
#include <new>

namespace moeffn {
namespace {

constexpr size_t kKeep = size_t{64} << 20;  // never hold more than this while idle
constexpr int kSlots = 8;

struct Block {
  char* data = nullptr;
  size_t bytes = 0;
};

std::mutex lock;
Block store[kSlots];
size_t held = 0;

size_t round_up(size_t bytes) {
  size_t step = bytes < (size_t{1} << 20) ? size_t{1} << 16 : size_t{1} << 20;
  return (bytes + step) / step * step;
}

}  // namespace

Scratch::Scratch(size_t bytes) : data_(nullptr), bytes_(round_up(bytes)) {
  {
    std::lock_guard<std::mutex> guard(lock);
    Block* best = nullptr;
    for (Block& b : store)
      if (b.data && b.bytes >= bytes_ && (!best || b.bytes < best->bytes)) best = &b;
    if (best) {
      data_ = best->data;
      bytes_ = best->bytes;
      held -= best->bytes;
      *best = Block{};
      return;
    }
    // Nothing fits: drop what is too small, so that a growing caller does not keep every size it once needed.
    for (Block& b : store)
      if (b.data) {
        std::free(b.data);
        held -= b.bytes;
        b = Block{};
      }
  }
  data_ = static_cast<char*>(std::aligned_alloc(4096, (bytes_ + 4095) / 4096 * 4096));
  if (!data_) throw std::bad_alloc();
}

Scratch::~Scratch() {
  {
    std::lock_guard<std::mutex> guard(lock);
    if (held + bytes_ <= kKeep)
      for (Block& b : store)
        if (!b.data) {
          b = Block{data_, bytes_};
          held += bytes_;
          return;
        }
  }
  std::free(data_);
}

size_t scratch_held() {
  std::lock_guard<std::mutex> guard(lock);
  return held;
}

void scratch_release() {
  std::lock_guard<std::mutex> guard(lock);
  for (Block& b : store) {
    std::free(b.data);
    b = Block{};
  }
  held = 0;
}

}  // namespace moeffn
