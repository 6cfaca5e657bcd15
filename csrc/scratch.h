// Working memory that outlives a call: fresh pages cost 0.25 us each, which decode would pay every time.
#pragma once
#include <cstddef>

namespace moeffn {

// 64-byte aligned memory from a shared, bounded store; given back at the end of the scope. Contents are undefined.
class Scratch {
 public:
  explicit Scratch(size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  char* data() const { return data_; }

 private:
  char* data_;
  size_t bytes_;
};

size_t scratch_held();   // bytes in the store, not in use
void scratch_release();  // frees them

// Hands out consecutive 64-byte aligned pieces: first with base == nullptr to learn the size, then for real.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}
  template <class T>
  T* take(size_t n) {
    size_t at = used_;
    used_ += (n * sizeof(T) + 63) / 64 * 64;
    return base_ ? reinterpret_cast<T*>(base_ + at) : nullptr;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

}  // namespace moeffn
