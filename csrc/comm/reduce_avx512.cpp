// Reduction kernels compiled for: avx512.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "reduce.hpp"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi,bmi2")
namespace elastic::comm::detail {
namespace {
namespace avx512 {
#include "reduce_kernels.hpp"
}
}  // namespace
ReduceFn kernel_avx512(DType type, ReduceOp op) {
  return avx512::pick(type, op);
}
}  // namespace elastic::comm::detail
#pragma GCC pop_options
#else
namespace elastic::comm::detail {
ReduceFn kernel_avx512(DType, ReduceOp) {
  return nullptr;
}
}  // namespace elastic::comm::detail
#endif
