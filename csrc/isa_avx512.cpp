#define MOEFFN_NS avx512
#define MOEFFN_WIDTH 16
#include "forward_set.h"

namespace moeffn {

const Kernels* kernels_avx512(DType, DType w) { return avx512::float_table(w, "avx512"); }

const Probe* probe_avx512() {
  static const Probe p = {avx512::spin_macs<avx512::FloatLane>, avx512::spin_macs<avx512::FloatLane>, avx512::read_streams};
  return &p;
}

}  // namespace moeffn
