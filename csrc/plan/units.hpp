// Costs of units as prefix sums: units [first, end) cost sum[end] - sum[first].
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace elastic::plan {

using Time = std::int64_t;      // ns
using Cuts = std::vector<int>;  // where stages begin, in units, and where the last one ends

// Bytes of a stage on its cell.
struct Memory {
  std::vector<std::int64_t> fixed;        // weights and their share of optimizer state
  std::vector<std::int64_t> held;         // activations of a micro-batch
  std::vector<std::pair<int, int>> tied;  // units that share a weight: a stage with both holds it once

  std::int64_t bytes(int first, int end, std::int64_t in_flight) const {
    std::int64_t need = fixed[end] - fixed[first] + in_flight * (held[end] - held[first]);
    for (const auto& [one, other] : tied) {
      // The weight is the smaller unit: the other one has more beside it.
      if (first <= one && one < end && first <= other && other < end) need -= std::min(unit(one), unit(other));
    }
    return need;
  }

 private:
  std::int64_t unit(int number) const { return fixed[number + 1] - fixed[number]; }
};

}  // namespace elastic::plan
