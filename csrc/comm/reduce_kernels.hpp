// Bodies of the reduction kernels: included once per instruction set, inside a
// namespace of its own and after the target pragma, so that no inline function
// compiled for a newer machine can be picked for an older one.
//
// No include guard, no includes: the including file brings <cstdint>, <cstring>
// and reduce.hpp before its pragma.

template <typename T>
struct Same {
  using Store = T;
  using Acc = T;
  static Acc load(T x) { return x; }
  static T store(Acc x) { return x; }
};

template <typename T>
struct Wide {
  using Store = T;
  using Acc = int64_t;
  static Acc load(T x) { return x; }
  static T store(Acc x) { return T(x); }
};

struct Brain {
  using Store = uint16_t;
  using Acc = float;
  static float load(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  static uint16_t store(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
  }
};

struct Half {
  using Store = uint16_t;
  using Acc = float;
  static float as_float(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  static uint32_t as_bits(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return bits;
  }
  static float load(uint16_t x) {
    const uint32_t sign = uint32_t(x & 0x8000u) << 16;
    const uint32_t magnitude = uint32_t(x & 0x7fffu);
    // Exponent re-biased by a multiplication, which also normalises subnormals.
    const uint32_t finite = as_bits(as_float(magnitude << 13) * as_float(0x77800000u));
    const uint32_t special = 0x7f800000u | (magnitude & 0x3ffu) << 13;
    return as_float(sign | (magnitude >= 0x7c00u ? special : finite));
  }
  static uint16_t store(float f) {
    const uint32_t bits = as_bits(f);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Subnormal results: the addition of 0.5 aligns the bits and rounds to nearest even.
    const uint32_t small = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t result = magnitude < 0x38800000u ? small : normal;
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;
    result = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : result;
    return uint16_t(sign | result);
  }
};

struct Truth {
  using Store = uint8_t;
  using Acc = uint8_t;
  static uint8_t load(uint8_t x) { return x != 0; }
  static uint8_t store(uint8_t x) { return x; }
};

// Integers wrap: computed unsigned, where that is defined.
struct AddOp {
  template <typename A>
  static A apply(A a, A b) {
    if constexpr (std::is_integral_v<A>) {
      return A(std::make_unsigned_t<A>(a) + std::make_unsigned_t<A>(b));
    } else {
      return a + b;
    }
  }
};
struct MulOp {
  template <typename A>
  static A apply(A a, A b) {
    if constexpr (std::is_integral_v<A>) {
      return A(uint64_t(a) * uint64_t(b));
    } else {
      return a * b;
    }
  }
};
struct MinOp {
  template <typename A>
  static A apply(A a, A b) {
    return (b < a || b != b) ? b : a;
  }
};
struct MaxOp {
  template <typename A>
  static A apply(A a, A b) {
    return (b > a || b != b) ? b : a;
  }
};
struct AndOp {
  template <typename A>
  static A apply(A a, A b) {
    return A(a & b);
  }
};
struct OrOp {
  template <typename A>
  static A apply(A a, A b) {
    return A(a | b);
  }
};
struct XorOp {
  template <typename A>
  static A apply(A a, A b) {
    return A(a ^ b);
  }
};

constexpr size_t kStrip = 1024;

template <typename F, typename Op, bool average>
void run(void* out_, const void* const* sources, size_t n, size_t count) {
  using Store = typename F::Store;
  using Acc = typename F::Acc;
  auto* out = static_cast<Store*>(out_);
  alignas(64) Acc acc[kStrip];
  for (size_t begin = 0; begin < count; begin += kStrip) {
    const size_t m = count - begin < kStrip ? count - begin : kStrip;
    const auto* first = static_cast<const Store*>(sources[0]) + begin;
    for (size_t i = 0; i < m; ++i) acc[i] = F::load(first[i]);
    for (size_t k = 1; k < n; ++k) {
      const auto* source = static_cast<const Store*>(sources[k]) + begin;
      for (size_t i = 0; i < m; ++i) acc[i] = Op::template apply<Acc>(acc[i], F::load(source[i]));
    }
    if (average) {
      const Acc divisor = Acc(n);
      for (size_t i = 0; i < m; ++i) acc[i] = Acc(acc[i] / divisor);
    }
    Store* target = out + begin;
    for (size_t i = 0; i < m; ++i) target[i] = F::store(acc[i]);
  }
}

// The common case, a sum of machine floats: two sources in one loop without the strip.
template <typename T>
void run_sum(void* out_, const void* const* sources, size_t n, size_t count) {
  if (n != 2) return run<Same<T>, AddOp, false>(out_, sources, n, count);
  auto* out = static_cast<T*>(out_);
  const auto* a = static_cast<const T*>(sources[0]);
  const auto* b = static_cast<const T*>(sources[1]);
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) out[i] = a[i] + b[i];
}

template <typename F>
ReduceFn arithmetic(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
      return run<F, AddOp, false>;
    case ReduceOp::Product:
      return run<F, MulOp, false>;
    case ReduceOp::Min:
      return run<F, MinOp, false>;
    case ReduceOp::Max:
      return run<F, MaxOp, false>;
    default:
      return nullptr;
  }
}

template <typename F>
ReduceFn floating(ReduceOp op) {
  return op == ReduceOp::Avg ? run<F, AddOp, true> : arithmetic<F>(op);
}

template <typename F>
ReduceFn bits(ReduceOp op) {
  switch (op) {
    case ReduceOp::Band:
      return run<F, AndOp, false>;
    case ReduceOp::Bor:
      return run<F, OrOp, false>;
    case ReduceOp::Bxor:
      return run<F, XorOp, false>;
    default:
      return nullptr;
  }
}

template <typename T>
ReduceFn integer(ReduceOp op) {
  if (op == ReduceOp::Avg) return run<Wide<T>, AddOp, true>;
  const ReduceFn fn = arithmetic<Same<T>>(op);
  return fn != nullptr ? fn : bits<Same<T>>(op);
}

inline ReduceFn boolean(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Max:
      return bits<Truth>(ReduceOp::Bor);
    case ReduceOp::Product:
    case ReduceOp::Min:
      return bits<Truth>(ReduceOp::Band);
    default:
      return bits<Truth>(op);
  }
}

inline ReduceFn pick(DType type, ReduceOp op) {
  switch (type) {
    case DType::F32:
      return op == ReduceOp::Sum ? run_sum<float> : floating<Same<float>>(op);
    case DType::F64:
      return op == ReduceOp::Sum ? run_sum<double> : floating<Same<double>>(op);
    case DType::BF16:
      return floating<Brain>(op);
    case DType::F16:
      return floating<Half>(op);
    case DType::I8:
      return integer<int8_t>(op);
    case DType::I16:
      return integer<int16_t>(op);
    case DType::I32:
      return integer<int32_t>(op);
    case DType::I64:
      return integer<int64_t>(op);
    case DType::U8:
      return integer<uint8_t>(op);
    case DType::Bool:
      return boolean(op);
  }
  return nullptr;
}
