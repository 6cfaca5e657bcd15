#define MOEFFN_NS portable
#define MOEFFN_WIDTH 4
#include "forward_set.h"

namespace moeffn {

const Kernels* kernels_portable(DType, DType w) { return portable::float_table(w, "portable"); }

const Probe* probe_portable() {
  static const Probe p = {portable::spin_macs<portable::FloatLane>, portable::spin_macs<portable::FloatLane>, portable::read_streams};
  return &p;
}

}  // namespace moeffn
