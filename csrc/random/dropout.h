// Dropout of a (slice of a) tensor whose elements are named by global coordinates.
#pragma once

#include <cstdint>
#include <vector>

#include "apply.h"
#include "isa.h"
#include "philox.h"

namespace megatron_elastic::random {

// A contiguous local tensor and where it lies in the whole one.
struct Layout {
  std::vector<int64_t> sizes;   // local sizes, all dimensions
  int64_t sample_dim;           // which of them counts samples
  std::vector<int64_t> extent;  // global sizes of the other dimensions, in order
  std::vector<int64_t> offset;  // where the local slice starts in each of them
};

// Throws std::invalid_argument unless the slice lies inside its extent and `samples` fits.
void check_layout(const Layout& layout, size_t samples);

// dst = dropout(src) (+ residual when not null). An element is dropped when its
// 32-bit word is below `drop_below`; kept ones are multiplied by `scale`.
void dropout(Isa isa, Dtype dtype, const Layout& layout, const Site& at, const std::vector<uint64_t>& samples,
             uint32_t drop_below, double scale, const void* src, const void* residual, void* dst);

}  // namespace megatron_elastic::random
