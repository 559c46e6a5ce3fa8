// One pass over a gradient that has come: copied to where it is kept, hashed, and its squares summed.
//
// Each of the three reads it once. Done in turn, each waits for memory again; together, the second and third find what
// the first one brought into the caches.
#pragma once

#include <cstddef>

#include "xxh3.hpp"

namespace elastic::state {

constexpr std::size_t kFewest = (LongXxh3::kShortest + sizeof(float) - 1) / sizeof(float);

struct Intake {
  Hash128 hash;    // XXH3 of the bits
  double squares;  // as sum_of_squares
};

// Both: at least kFewest elements. `from` and `to` do not overlap.
Intake take_in(const float* from, float* to, std::size_t count);
Hash128 hash_of(const float* values, std::size_t count);

}  // namespace elastic::state
