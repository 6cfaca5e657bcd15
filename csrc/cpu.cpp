#include "cpu.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "problem.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace moeffn {
namespace {

const char* const kNames[kIsas] = {"portable", "avx2", "avx512", "avx512_bf16", "amx"};

#if defined(__x86_64__)

uint64_t enabled_state() {
  uint32_t eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & (1u << 27))) return 0;  // OSXSAVE
  uint32_t lo, hi;
  __asm__("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (static_cast<uint64_t>(hi) << 32) | lo;
}

// Linux grants the 8 KiB of tile registers to a process only when asked.
bool tiles_granted() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

int best_level() {
  const uint64_t state = enabled_state();
  uint32_t a1, b1, c1, d1, a7, b7, c7, d7, a71 = 0, b71, c71, d71;
  if (!__get_cpuid(1, &a1, &b1, &c1, &d1) || !__get_cpuid_count(7, 0, &a7, &b7, &c7, &d7)) return 0;
  if (a7 >= 1 && !__get_cpuid_count(7, 1, &a71, &b71, &c71, &d71)) a71 = 0;
  const bool fma = c1 & (1u << 12), f16c = c1 & (1u << 29), avx2 = b7 & (1u << 5);
  if ((state & 0x6) != 0x6 || !fma || !f16c || !avx2) return 0;
  const uint32_t wide = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // F, DQ, BW, VL
  if ((state & 0xe6) != 0xe6 || (b7 & wide) != wide) return 1;
  if (!(a71 & (1u << 5))) return 2;  // AVX512_BF16
  const bool amx = (d7 & (1u << 22)) && (d7 & (1u << 24)) && (state & 0x60000) == 0x60000;
  return amx && tiles_granted() ? 4 : 3;
}

#else

int best_level() { return 0; }

#endif

int level() {
  static const int found = best_level();
  return found;
}

Isa parse(const char* name) {
  for (int i = 0; i < kIsas; ++i)
    if (std::strcmp(name, kNames[i]) == 0) {
      if (i > level())
        throw BadArgument(std::string("MOEFFN_ISA: this machine cannot run '") + name + "'; its best is '" +
                          kNames[level()] + "'");
      return static_cast<Isa>(i);
    }
  throw BadArgument(std::string("MOEFFN_ISA: expected portable, avx2, avx512, avx512_bf16 or amx, got '") + name + "'");
}

std::atomic<int> forced{-1};

}  // namespace

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

bool isa_supported(Isa isa) { return static_cast<int>(isa) <= level(); }

Isa chosen_isa() {
  const int f = forced.load(std::memory_order_relaxed);
  if (f >= 0) return static_cast<Isa>(f);
  const char* name = std::getenv("MOEFFN_ISA");
  const Isa isa = name && *name ? parse(name) : static_cast<Isa>(level());
  forced.store(static_cast<int>(isa), std::memory_order_relaxed);
  return isa;
}

void force_isa(const char* name) {
  forced.store(name && *name ? static_cast<int>(parse(name)) : -1, std::memory_order_relaxed);
}

}  // namespace moeffn
