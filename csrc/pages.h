// Large buffers that outlive a call: weight gradients, and the rows that a backward keeps for a while.
#pragma once
#include <cstddef>

namespace moeffn {

struct Pages {
  char* data = nullptr;
  size_t bytes = 0;     // whole huge pages
  bool zeroed = false;  // never written to
};

// Memory on 2 MiB pages where the system has them. Fresh pages cost 4 to 10 times what writing them does (a fault and a
// clearing each), and a training step would pay that for every gradient; so what is given back is kept for the next
// request of about that size: kept and used together are at most 1.25 times the most that was ever in use at once, and
// kept at most MOEFFN_KEEP_MIB if that is set (0: nothing). Throws std::bad_alloc.
Pages pages_take(size_t bytes);
void pages_give(const Pages& pages) noexcept;
size_t pages_held();     // bytes kept and not in use
void pages_release();    // unmaps them

}  // namespace moeffn
