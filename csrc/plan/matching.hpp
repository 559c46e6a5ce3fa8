// Matching of seats to takers with the greatest total weight (megatron/elastic/plan/search/matching.py).
#pragma once

#include <cstdint>
#include <vector>

namespace elastic::plan {

// Returns the taker of each seat. `weights[s][t]` is that of a seat and a taker of kinds s and t; `seats` and `takers`
// are their kinds. `in_order`: of equal totals the one with the smallest sum of squares of (seat - taker) is taken.
// Throws std::invalid_argument if there are fewer takers than seats, or if a kind has no weight.
std::vector<int> matching(const std::vector<std::vector<std::int64_t>>& weights, const std::vector<int>& seats,
                          const std::vector<int>& takers, bool in_order);

}  // namespace elastic::plan
