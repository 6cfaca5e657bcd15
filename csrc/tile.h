// A block's rows as the kernels want them. Included after products.h.
//
// A tile holds its first rows as panels of vectors for the register blocks; the last ones, too few to fill a vector, as
// rows for dot products.

namespace moeffn {
namespace MOEFFN_NS {

constexpr int64_t kTileBytes = 3 << 20;  // one block of rows where possible: a second one reads the weights again

// How a tile holds its rows: `vectors` of W tokens in `panels` panels, then `dots` rows.
struct Cut {
  int64_t vectors = 0, panels = 0, dots = 0;

  // Panel p holds vectors [first(p), first(p + 1)).
  MOEFFN_SMALL int64_t first(int64_t p) const { return vectors * p / panels; }
};

MOEFFN_INLINE Cut cut_rows(int64_t rows) {
  Cut c;
  c.vectors = rows <= kDotLimit ? 0 : (rows + W / 2 - 1) / W;
  c.panels = (c.vectors + kVectors - 1) / kVectors;
  c.dots = c.vectors * W < rows ? rows - c.vectors * W : 0;
  return c;
}

// Floats of a tile of rows with `elems` elements: panels (lanes, vectors * W), then rows of row_lanes.
template <class L>
MOEFFN_INLINE int64_t dots_at(const Cut& cut, int64_t elems) {
  return cut.vectors * W * lanes_of<L>(elems);
}
template <class L>
MOEFFN_INLINE int64_t tile_floats(const Cut& cut, int64_t elems) {
  return dots_at<L>(cut, elems) + cut.dots * row_lanes<L>(elems);
}

// Pieces of Local::data; with data == nullptr only their total size is of interest.
struct Buffers {
  float* tile;   // of the rows of x
  float* sums;   // per panel (kChunk, its tokens), then per dot row (kChunk,)
  float* bias;   // (kChunk,)
  float* wide;   // a block of kChunk weight rows in the kernels' own dtype, for weights of another
  void* copies;  // kChunk rows of weights, for weights whose rows are not contiguous
  float* wide_sums;  // (dots, max(2 F, D)): all sums of a task of few rows
  float* row;    // (D,) one row of x as floats
  float* rows;   // (W, row_lanes(D)) rows of x before they become a vector of a panel
};

// Whether the kernels read weight rows of `elems` elements where they lie.
template <class L, class WT>
MOEFFN_INLINE bool direct(int64_t elems) {
  return std::is_same<WT, typename L::Elem>::value && elems % L::kPerLane == 0;
}
MOEFFN_INLINE bool contiguous_rows(const Experts& w) { return w.w_in.s2 == 1 && w.w_out.s2 == 1; }
// Whether a product with this matrix goes by its columns.
MOEFFN_INLINE bool by_columns(const Cut& cut, const Array& w) { return !cut.vectors && w.s2 != 1 && w.s1 == 1; }
// Whether all dot products of a task are taken before any is used: whatever comes between them, the memory waits for.
MOEFFN_INLINE bool dots_at_once(const Cut& cut, const Array& w) { return !cut.vectors && w.s2 == 1; }

template <class L, class WT>
MOEFFN_INLINE Buffers carve(char* data, const Cut& cut, const Experts& w, size_t* used) {
  int64_t at = 0;
  auto take = [&](int64_t bytes) {
    char* p = data ? data + at : nullptr;
    at += round_to(bytes, 64);
    return p;
  };
  const bool widens = cut.vectors && !(direct<L, WT>(w.D) && direct<L, WT>(w.F));
  Buffers b;
  b.tile = reinterpret_cast<float*>(take(tile_floats<L>(cut, w.D) * 4));
  b.sums = reinterpret_cast<float*>(take((cut.vectors * W + cut.dots) * kChunk * 4));
  b.bias = reinterpret_cast<float*>(take(kChunk * 4));
  b.wide = reinterpret_cast<float*>(take(widens ? kChunk * (kWideLanes + W) * 4 : 0));
  b.copies = take(contiguous_rows(w) ? 0 : kChunk * (w.D > w.F ? w.D : w.F) * static_cast<int64_t>(sizeof(WT)));
  const int64_t widest = w.D > w.in_rows() ? w.D : w.in_rows();
  b.wide_sums = reinterpret_cast<float*>(take(cut.vectors ? 0 : cut.dots * widest * 4));
  b.row = reinterpret_cast<float*>(take(round_to(w.D, W) * 4));
  b.rows = reinterpret_cast<float*>(take(cut.vectors ? W * row_lanes<L>(w.D) * 4 : 0));
  if (used) *used = static_cast<size_t>(at);
  return b;
}

// Row r of the block's tile: the token's row of x, scaled first when the routing weights scale the input.
template <class L, class XT>
static void gather_row(const Part& p, int64_t row, float* to, float* tmp) {
  const int64_t D = p.w->D;
  const int64_t slot = p.plan.slot_of_row ? p.plan.slot_of_row[row] : row;
  const XT* x = static_cast<const XT*>(p.x.at(slot / p.plan.K));
  const int64_t step = p.x.s1, lanes = row_lanes<L>(D);
  using Elem = typename L::Elem;
  Elem* out = reinterpret_cast<Elem*>(to);
  const int64_t padded = lanes * L::kPerLane;
  if (!p.in_scale && step == 1 && sizeof(XT) == sizeof(Elem)) {
    memcpy(out, x, static_cast<size_t>(D) * sizeof(Elem));  // the tile's own dtype
  } else {
    if (step == 1) {
      for (int64_t d = 0; d < D; d += W) store_upto(tmp + d, load_upto(x + d, D - d), D - d);
    } else {
      for (int64_t d = 0; d < D; ++d) tmp[d] = get(x + d * step);
    }
    if (p.in_scale) {  // rounded to the dtype of x, as x * weight would be
      const float w = p.in_scale[slot];
      XT rounded[W];
      for (int64_t d = 0; d < D; d += W) {
        store(rounded, load_upto(tmp + d, D - d) * w);
        store_upto(tmp + d, load(rounded), D - d);
      }
    }
    for (int64_t d = 0; d < D; d += W) store_upto(out + d, load_upto(tmp + d, D - d), D - d);
  }
  memset(out + D, 0, static_cast<size_t>(padded - D) * sizeof(Elem));
}

MOEFFN_INLINE int64_t slot_of(const Part& p, int64_t row) { return p.plan.slot_of_row ? p.plan.slot_of_row[row] : row; }

// The rows of up to W tokens from `row`, as `tile` holds them; past `count`, nullptr. Rows that cannot be read where they
// lie are gathered to `rows`.
template <class L, class XT>
static void find_rows(const Part& p, int64_t row, int64_t count, float* rows, float* tmp, const typename L::Elem** found) {
  using Elem = typename L::Elem;
  const int64_t stride = row_lanes<L>(p.w->D);
  for (int64_t i = 0; i < W; ++i) {
    found[i] = nullptr;
    if (i >= count) continue;
    if (std::is_same<XT, Elem>::value && p.x.s1 == 1 && !p.in_scale) {
      found[i] = static_cast<const Elem*>(p.x.at(slot_of(p, row + i) / p.plan.K));
    } else {
      gather_row<L, XT>(p, row + i, rows + i * stride, tmp);
      found[i] = reinterpret_cast<const Elem*>(rows + i * stride);
    }
  }
}

template <class L>
static void gather(const Part& p, const Block& block, const Cut& cut, const Buffers& buf) {
  const int64_t D = p.w->D, lanes = lanes_of<L>(D), stride = row_lanes<L>(D);
  with_type(p.x.data, p.x.dtype, [&](auto* x) {
    using XT = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
    for (int64_t i = 0; i < cut.panels; ++i)
      for (int64_t v = cut.first(i), width = (cut.first(i + 1) - v) * W; v < cut.first(i + 1); ++v) {
        const typename L::Elem* rows[W];
        find_rows<L, XT>(p, block.row + v * W, block.rows - v * W, buf.rows, buf.row, rows);
        pack_rows<L>(rows, D, buf.tile + cut.first(i) * W * lanes + (v - cut.first(i)) * W, width);
      }
    for (int64_t m = 0; m < cut.dots; ++m)
      gather_row<L, XT>(p, block.row + cut.vectors * W + m, buf.tile + dots_at<L>(cut, D) + m * stride, buf.row);
  });
}

}  // namespace MOEFFN_NS
}  // namespace moeffn
