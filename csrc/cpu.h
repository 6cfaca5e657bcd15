// Which instruction sets this machine runs, and which one is used.
#pragma once
#include <atomic>

namespace moeffn {

enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3, amx = 4 };
constexpr int kIsas = 5;

const char* isa_name(Isa isa);
bool isa_supported(Isa isa);
// The best supported one, or the one that the environment variable MOEFFN_ISA names (BadArgument if it cannot run here).
Isa chosen_isa();
// For tests: as MOEFFN_ISA, but at run time; nullptr goes back to the choice above.
void force_isa(const char* name);
// Name of the kernels of the latest call.
inline std::atomic<const char*> last_kernel{"none"};

}  // namespace moeffn
