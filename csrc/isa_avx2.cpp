#define MOEFFN_NS avx2
#define MOEFFN_WIDTH 8
#include "forward_set.h"

namespace moeffn {

const Kernels* kernels_avx2(DType, DType w) { return avx2::float_table(w, "avx2"); }

const Probe* probe_avx2() {
  static const Probe p = {avx2::spin_macs<avx2::FloatLane>, avx2::spin_macs<avx2::FloatLane>, avx2::read_streams};
  return &p;
}

}  // namespace moeffn
