// Cutting the model over the ordered cells of one pipeline (megatron/elastic/plan/search/partition.py says what is
// asked).
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "units.hpp"

namespace elastic::plan {

// A cell of the pipeline.
struct Seat {
  std::int64_t speed_ppm, memory_bytes;
  std::int64_t in_flight;  // micro-batches it holds
};

class Partition {
 public:
  // work: of one micro-batch, ns; moved: bytes that a cell has to fetch for a unit it does not hold. Throws
  // std::invalid_argument when the sums are of unequal length.
  Partition(std::vector<Time> work, Memory memory, std::vector<std::int64_t> moved);

  // Of [first, end) on a cell of that speed.
  Time stage_time(int first, int end, std::int64_t speed_ppm) const;
  // Minimax cut over `seats`, none if memory forbids; stages may be empty. A transfer takes `transfer`.
  std::optional<Cuts> cut(const std::vector<Seat>& seats, Time transfer) const;
  // Among cuts with every stage within `time` the one whose cells fetch the fewest bytes; ties: shorter first stages.
  // holds[i]: unit ranges of seat i, which do not overlap. None if there is no such cut.
  std::optional<Cuts> nearest(const std::vector<Seat>& seats, Time time,
                              const std::vector<std::vector<std::pair<int, int>>>& holds) const;

 private:
  int reach(int first, const Seat& seat, Time time) const;
  std::optional<Cuts> greedy(const std::vector<Seat>& seats, Time time) const;
  Time slowest(const std::vector<Seat>& seats, const Cuts& cuts) const;

  std::vector<Time> work_;
  Memory memory_;
  std::vector<std::int64_t> moved_;
  int units_;
};

}  // namespace elastic::plan
