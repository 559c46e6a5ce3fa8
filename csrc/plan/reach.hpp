// Which pipelines may meet a deadline, and on how few cells (megatron/elastic/plan/search/bound.py says what is
// counted).
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "units.hpp"

namespace elastic::plan {

// For one micro-batch on the fastest cell.
struct UnitTimes {
  std::vector<Time> forward, gradient, weight;
};

class Reach {
 public:
  // `room`: memory of the largest cell, in bytes. Throws std::invalid_argument when the sums are of unequal length.
  Reach(UnitTimes times, Memory memory, std::int64_t room);

  // No schedule of `count` micro-batches through [first, end) is shorter, `held` of them held at once.
  Time least(int first, int end, std::int64_t count, std::int64_t held) const;
  // Micro-batches whose activations fit a cell that holds [first, end).
  std::int64_t room(int first, int end) const;
  // The pipeline of fewest stages that may finish `count` micro-batches by `deadline`; none if there is none.
  std::optional<Cuts> cuts(std::int64_t count, Time deadline) const;
  // Another such pipeline, from the end backwards: long stages come as late as they may.
  std::optional<Cuts> late_cuts(std::int64_t count, Time deadline) const;
  // Cuts and micro-batches of the set of pipelines on `cells` cells that may finish most by `deadline`.
  std::vector<std::pair<Cuts, int>> pipelines(int cells, int total, Time deadline) const;
  // The least multiple of `quantum`, from `low` of them, by which `total` micro-batches may be done on `cells`
  // cells; none if that takes more than `limit`.
  std::optional<Time> least_deadline(int cells, int total, Time quantum, Time low, Time limit) const;

 private:
  struct Stage {
    Time forward, gradient, weight;  // of the stage
    Time forward_before, gradient_before;
    Time trip;  // from the end of the stage to the end of the pipeline and back
    Time tail;  // weight gradient that still has to follow the last input gradient somewhere
    std::int64_t room;
  };

  Stage stage(int first, int end) const;
  bool meets(int first, int end, std::int64_t count, Time deadline) const;
  bool enough(int cells, int total, Time deadline) const;

  UnitTimes times_;
  Memory memory_;
  std::int64_t room_;
  int units_;
};

// Lengths (any number of each) of total at most `room` with the largest total value, longest first. values[length].
std::vector<int> knapsack(int room, const std::vector<std::int64_t>& values);

}  // namespace elastic::plan
