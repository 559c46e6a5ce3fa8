#include "reduce.hpp"

#include "errors.hpp"

namespace elastic::comm {
namespace {

enum class Isa { Baseline, Avx2, Avx512 };

Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Isa::Avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) return Isa::Avx2;
#endif
  return Isa::Baseline;
}

Isa instruction_set() {
  static const Isa isa = detect();
  return isa;
}

detail::ReduceFn kernel(DType type, ReduceOp op) {
  switch (instruction_set()) {
    case Isa::Avx512:
      return detail::kernel_avx512(type, op);
    case Isa::Avx2:
      return detail::kernel_avx2(type, op);
    default:
      return detail::kernel_baseline(type, op);
  }
}

}  // namespace

const char* reduce_instruction_set() {
  switch (instruction_set()) {
    case Isa::Avx512:
      return "avx512";
    case Isa::Avx2:
      return "avx2";
    default:
      return "baseline";
  }
}

void expect_defined(DType type, ReduceOp op) {
  if (kernel(type, op) == nullptr) throw CommError("this reduction is not defined for this element type");
}

void reduce(DType type, ReduceOp op, void* out, const void* const* sources, size_t n, size_t count) {
  if (n == 0 || count == 0) return;
  expect_defined(type, op);
  kernel(type, op)(out, sources, n, count);
}

}  // namespace elastic::comm
