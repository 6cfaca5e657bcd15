#define MOEFFN_NS amx
#define MOEFFN_WIDTH 16
#define MOEFFN_STREAM_AHEAD 8192
#include "forward_set.h"

#include "amx_tiles.h"

#include "amx.h"

#include "amx_parts.h"

#include "amx_split.h"

namespace moeffn {
namespace amx {

// Multiply-adds of four independent tiles.
static double spin_tiles(int64_t rounds, float, float* sink) {
  const UseTiles tiles;
  for (int64_t r = 0; r < rounds; ++r) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  *sink = 0.0f;
  return 4.0 * 2.0 * 16 * 16 * 32 * static_cast<double>(rounds);
}

}  // namespace amx

const Probe* probe_amx() {
  using namespace amx;
  static const Probe p = {spin_macs<FloatLane>, spin_tiles, read_streams};
  return &p;
}

const Kernels* kernels_amx(DType x, DType w) {
  using namespace amx;
  static const Kernels split = {split_act_bytes, split_max_rows, split_local_bytes, split_up, split_down,
                                combine_task,    "amx",             logits_task<float>};
  if (x == DType::f32 && w == DType::f32) return &split;
  if (x != DType::bf16 || w != DType::bf16) return float_table(w, "avx512");
  static const Kernels k = {tile_act_bytes, tile_max_rows, tile_local_bytes, tile_up, tile_down,
                            combine_task,   "amx",            logits_task<bf16>};
  return &k;
}

}  // namespace moeffn
