// A router's logits for few tokens: float32 sums of products of the widened values. Included after finish.h.

namespace moeffn {
namespace MOEFFN_NS {

template <class WT>
static void logits_task(const Scores& s, int64_t c0, int64_t c1, float* tile, bool fill) {
  const int64_t stride = row_lanes<FloatLane>(s.D);
  if (fill)
    with_type(s.x.data, s.x.dtype, [&](auto* x) {
      for (int64_t t = 0; t < s.T; ++t) {
        float* row = tile + t * stride;
        for (int64_t d = 0; d < s.D; d += W) store_upto(row + d, load_upto(x + t * s.D + d, s.D - d), s.D - d);
        memset(row + s.D, 0, static_cast<size_t>(stride - s.D) * 4);
      }
    });
  for (int64_t c = c0; c < c1; c += kStreams) {
    const int64_t count = least(kStreams, c1 - c);
    const WT* rows[kStreams];
    for (int64_t j = 0; j < kStreams; ++j) rows[j] = static_cast<const WT*>(s.w.at(c + least(j, count - 1)));
    float bias[kStreams];
    fetch_bias(s.b, 0, c, 1, count, bias);
    for (int64_t t = 0; t < s.T; t += kDotLimit) {
      const int64_t n = least(kDotLimit, s.T - t);
      float sums[kDotLimit * kStreams];
      dot_rows<FloatLane, WT, kStreams>(n, tile + t * stride, stride, rows, s.D, sums);
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < count; ++j) s.out[(t + i) * s.C + c + j] = sums[i * kStreams + j] + bias[j];
    }
  }
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
