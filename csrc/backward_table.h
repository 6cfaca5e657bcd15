// The table of one instruction set. Included last by backward_set.h.

namespace moeffn {
namespace MOEFFN_NS {

#define MOEFFN_TYPED(call)                                                        \
  [&](auto* p) {                                                                  \
    using E = std::remove_const_t<std::remove_pointer_t<decltype(p)>>;            \
    call;                                                                         \
  }

// Everything by the words L: pairs take bf16 and float (which they round); floats take all.
template <class L, class Fn>
MOEFFN_INLINE void with_elements(DType t, const Fn& f) {
  if constexpr (L::kPer == 2) {
    if (t == DType::f32)
      f(static_cast<const float*>(nullptr));
    else
      f(static_cast<const bf16*>(nullptr));
  } else {
    with_type(nullptr, t, f);
  }
}

template <class L>
static void pack_a_any(const RowsOf& from, int64_t k, float* out) {
  with_elements<L>(from.dtype, MOEFFN_TYPED((pack_a<L, E>(from, k, out))));
}
template <class L>
static void pack_a_turned_any(const RowsOf& from, int64_t m, float* out) {
  with_elements<L>(from.dtype, MOEFFN_TYPED((pack_a_turned<L, E>(from, m, out))));
}
template <class L>
static void pack_b_any(const RowsOf& from, int64_t n, float* out) {
  with_elements<L>(from.dtype, MOEFFN_TYPED((pack_b<L, E>(from, n, out))));
}
template <class L>
static void pack_b_turned_any(const RowsOf& from, int64_t k, float* out) {
  with_elements<L>(from.dtype, MOEFFN_TYPED((pack_b_turned<L, E>(from, k, out))));
}

template <class L>
static float act_row(const ActRow& r, int64_t n) {
  float dot = 0.0f;
  with_elements<L>(r.h_dtype, MOEFFN_TYPED((dot = act_row_of<L, E>(r, n))));
  return dot;
}

template <class L>
static void scale_row(const char* row, DType dtype, int64_t n, float scale, char* out) {
  auto* to = reinterpret_cast<typename L::Elem*>(out);
  with_type(row, dtype, [&](auto* p) {
    for (int64_t k = 0; k < n; k += W) store_upto(to + k, scale * load_upto(p + k, n - k), n - k);
  });
}

static void add_row(const char* row, DType dtype, int64_t n, float scale, float* to) {
  with_type(row, dtype, [&](auto* p) {
    for (int64_t k = 0; k < n; k += W)
      store_upto(to + k, fma(splat(scale), load_upto(p + k, n - k), load_upto(to + k, n - k)), n - k);
  });
}

static float dot_row(const char* a, DType a_dtype, const char* b, DType b_dtype, int64_t n) {
  vf dot = splat(0.0f);
  with_type(a, a_dtype, [&](auto* p) {
    with_type(b, b_dtype, [&](auto* q) {
      for (int64_t k = 0; k < n; k += W) dot = fma(load_upto(p + k, n - k), load_upto(q + k, n - k), dot);
    });
  });
  return sum(dot);
}

static void write_row(const float* row, int64_t n, float scale, char* out, DType dtype, bool add) {
  with_type(out, dtype, [&](auto* p) {
    auto* to = const_cast<std::remove_const_t<std::remove_pointer_t<decltype(p)>>*>(p);
    for (int64_t k = 0; k < n; k += W) {
      vf v = scale * load_upto(row + k, n - k);
      if (add) v += load_upto(p + k, n - k);
      store_upto(to + k, v, n - k);
    }
  });
}

static void clear(char* to, size_t bytes) {
#if MOEFFN_WIDTH == 16
  const size_t head = (64 - (reinterpret_cast<uintptr_t>(to) & 63)) & 63;
  if (bytes > head) {
    memset(to, 0, head);
    to += head;
    bytes -= head;
    for (; bytes >= 64; bytes -= 64, to += 64) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_setzero_si512());
    stream_fence();
  }
#endif
  memset(to, 0, bytes);
}

template <class L>
static const BackwardKernels* backward_table(const char* name) {
  static const BackwardKernels table = {name,
                                        L::kPer == 2,
                                        kPanelRows,
                                        pack_a_any<L>,
                                        pack_a_turned_any<L>,
                                        pack_b_any<L>,
                                        pack_b_turned_any<L>,
                                        product<L>,
                                        product_grad<L>,
                                        act_row<L>,
                                        scale_row<L>,
                                        add_row,
                                        dot_row,
                                        write_row,
                                        clear};
  return &table;
}

#undef MOEFFN_TYPED

}  // namespace MOEFFN_NS
}  // namespace moeffn
