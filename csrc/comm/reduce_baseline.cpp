// Reduction kernels compiled for: baseline.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "reduce.hpp"

namespace elastic::comm::detail {
namespace {
namespace baseline {
#include "reduce_kernels.hpp"
}
}  // namespace
ReduceFn kernel_baseline(DType type, ReduceOp op) {
  return baseline::pick(type, op);
}
}  // namespace elastic::comm::detail
