#define MOEFFN_NS avx512_bf16
#define MOEFFN_WIDTH 16
#include "forward_set.h"

namespace moeffn {

const Kernels* kernels_avx512_bf16(DType x, DType w) {
  using namespace avx512_bf16;
  if (x == DType::bf16 && w == DType::bf16) return table<PairLane, bf16>("avx512_bf16");
  return float_table(w, "avx512");
}

const Probe* probe_avx512_bf16() {
  using namespace avx512_bf16;
  static const Probe p = {spin_macs<FloatLane>, spin_macs<PairLane>, read_streams};
  return &p;
}

}  // namespace moeffn
