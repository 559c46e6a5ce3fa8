// Gradients as 64-bit fixed point: sums that do not depend on their order.
//
// Integer addition is associative, so the sum over the samples of a batch has the
// same bits however samples are spread over processes and in whichever order they
// arrive (docs/design.md §8). Each contribution is rounded once, to nearest even,
// at a resolution of 1/scale; scale is a power of two, so that scaling is exact.
//
// A fold reads a gradient once, while the processor's caches still hold it. Runs of
// zeros, as an embedding's gradient has for tokens that do not occur, leave the sums
// untouched: memory traffic is what a fold costs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace elastic::state {

enum FoldFlags : unsigned {
  kFoldOutOfRange = 1,  // a finite contribution of magnitude >= limit: the sum could overflow
  kFoldNotFinite = 2,
};

// Largest limit fold() may be given: the conversion is done by adding 1.5 * 2^52.
constexpr double kLargestContribution = 2251799813685248.0;  // 2^51

// sum[i] = round(grad[i] * scale) + (first ? 0 : sum[i]). With `first`, sum is only written. Returns FoldFlags; where
// one is set, what sum holds is not specified.
unsigned fold(const float* grad, std::int64_t* sum, std::size_t count, double scale, double limit, bool first);

// out[i] = sum[i] / scale, rounded to nearest even.
void unfold(const std::int64_t* sum, float* out, std::size_t count, double scale);

}  // namespace elastic::state
