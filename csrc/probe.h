// What the machine can do at most, for one instruction set: the ceilings that benchmarks divide by. Included after
// lanes.h, in the same namespace.

namespace moeffn {
namespace MOEFFN_NS {

// `rounds` steps of independent multiply-adds in registers; returns the FLOPs done. *sink keeps them alive.
template <class L>
static double spin_macs(int64_t rounds, float seed, float* sink) {
#if defined(__AVX2__)
  constexpr int kChains = 12;
#else
  constexpr int kChains = 8;
#endif
  vf acc[kChains];
  vf a = splat(seed), b = splat(seed + 1.0f);
  for (int i = 0; i < kChains; ++i) acc[i] = splat(static_cast<float>(i));
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) acc[i] = L::mac(a, b, acc[i]);
  }
  vf total = splat(0.0f);
  for (int i = 0; i < kChains; ++i) total += acc[i];
  *sink = sum(total);
  return 2.0 * static_cast<double>(rounds) * kChains * W * L::kPerLane;
}

// Reads [p, p + bytes) in eight sequential streams: on Sapphire Rapids and Zen 4 one to four are slower (up to a quarter),
// sixteen at most a few percent faster.
static float read_streams(const char* p, int64_t bytes) {
  constexpr int kReads = 8;
  const int64_t each = bytes / kReads / 256 * 256;
  vu acc[kReads] = {};
  for (int64_t i = 0; i < each; i += sizeof(vu))
#pragma GCC unroll 8
    for (int s = 0; s < kReads; ++s) {
      vu v;
      memcpy(&v, p + s * each + i, sizeof v);
      acc[s] ^= v;
    }
  vu all = acc[0];
  for (int s = 1; s < kReads; ++s) all ^= acc[s];
  return sum(as_float(all & 0x3fffffffu));
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
