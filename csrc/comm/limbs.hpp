// Natural numbers cut into three fp64 values, so that a sum of fp64 vectors adds them exactly, as long as the sum is
// below 2^95. `comm/limbs.py` cuts them alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace elastic::comm {

constexpr unsigned kLimbBits = 21;
constexpr size_t kLimbs = 3;

// Appends the limbs of `lower` + `above` * 2^64, lowest first; the last one holds the rest.
inline void append_limbs(std::vector<double>& values, uint64_t lower, double above) {
  constexpr uint64_t kMask = (uint64_t(1) << kLimbBits) - 1;
  constexpr double kAbove = double(uint64_t(1) << (64 - 2 * kLimbBits));
  values.push_back(double(lower & kMask));
  values.push_back(double(lower >> kLimbBits & kMask));
  values.push_back(double(lower >> 2 * kLimbBits) + above * kAbove);
}

// The sum whose limbs add up to those at `limbs`: its lower 64 bits, and those above. Throws std::domain_error for what
// no sum of limbs can be.
inline std::pair<uint64_t, uint64_t> of_limbs(const double* limbs) {
  __extension__ using Wide = unsigned __int128;
  Wide sum = 0;
  for (size_t i = 0; i < kLimbs; ++i) {
    if (!(limbs[i] >= 0 && limbs[i] < 0x1p63)) throw std::domain_error("elastic: a sum of counts is out of range");
    sum += Wide(uint64_t(limbs[i])) << i * kLimbBits;
  }
  return {uint64_t(sum), uint64_t(sum >> 64)};
}

}  // namespace elastic::comm
