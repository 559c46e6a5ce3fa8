// y[i] = bit i ? x[i] * scale : 0, optionally + residual[i], in the tensor's own precision.
//
// Every step rounds to the tensor's type as torch's separate operators would:
// bf16 and fp16 multiply in fp32 and round to nearest even, then add in fp32 and
// round again. A dropped element is +0 whatever it held (also NaN or infinity).
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace megatron_elastic::random {

enum class Dtype { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

inline size_t item_size(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
}

// `bits` holds ceil(n / 64) words. `dst` may be `src` or `residual`; `residual` may be null.
void apply_bits(Isa isa, Dtype dtype, const uint64_t* bits, size_t n, const void* src, const void* residual, void* dst,
                double scale);

}  // namespace megatron_elastic::random
