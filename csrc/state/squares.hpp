// Sums of squares in fp64 in a fixed order: element i goes to lane i % kLanes, each lane adds sequentially, and a fixed
// binary tree combines the lanes.
#pragma once

#include <cstddef>

#include "clones.hpp"

namespace elastic::state {

constexpr std::size_t kLanes = 16;

// Adds rows of kLanes elements.
ELASTIC_INLINE void add_squares(const float* __restrict values, std::size_t rows, double* __restrict lanes) {
  double sum[kLanes];
  for (std::size_t lane = 0; lane < kLanes; ++lane) sum[lane] = lanes[lane];
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const double x = values[row * kLanes + lane];
      sum[lane] += x * x;
    }
  }
  for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = sum[lane];
}

// Adds what the rows of `count` elements have left over.
ELASTIC_INLINE void add_last_squares(const float* values, std::size_t count, double* lanes) {
  for (std::size_t i = count / kLanes * kLanes; i < count; ++i) {
    const double x = values[i];
    lanes[i % kLanes] += x * x;
  }
}

ELASTIC_INLINE double sum_of_lanes(double* lanes) {
  for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

}  // namespace elastic::state
