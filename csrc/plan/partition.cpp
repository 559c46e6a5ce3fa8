#include "partition.hpp"

#include <algorithm>
#include <stdexcept>

namespace elastic::plan {

namespace {

constexpr std::int64_t kPpm = 1'000'000;

// a * b / c, rounded up or down; the product may pass 64 bits.
std::int64_t scaled(std::int64_t a, std::int64_t b, std::int64_t c, bool up) {
  const __int128 product = static_cast<__int128>(a) * b;
  return static_cast<std::int64_t>((product + (up ? c - 1 : 0)) / c);
}

}  // namespace

Partition::Partition(std::vector<Time> work, Memory memory, std::vector<std::int64_t> moved)
    : work_(std::move(work)), memory_(std::move(memory)), moved_(std::move(moved)) {
  const std::size_t marks = work_.size();
  if (marks < 2 || memory_.fixed.size() != marks || memory_.held.size() != marks || moved_.size() != marks) {
    throw std::invalid_argument("prefix sums must be over the same units");
  }
  units_ = static_cast<int>(marks) - 1;
}

Time Partition::stage_time(int first, int end, std::int64_t speed_ppm) const {
  return scaled(work_[end] - work_[first], kPpm, speed_ppm, true);
}

// Largest end such that [first, end) fits time and memory.
int Partition::reach(int first, const Seat& seat, Time time) const {
  const Time most = work_[first] + scaled(time, seat.speed_ppm, kPpm, false);
  int end = static_cast<int>(std::upper_bound(work_.begin(), work_.end(), most) - work_.begin()) - 1;
  end = std::max(first, std::min(end, units_));
  if (memory_.bytes(first, end, seat.in_flight) <= seat.memory_bytes) return end;
  int low = first, high = end;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (memory_.bytes(first, middle, seat.in_flight) <= seat.memory_bytes) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

std::optional<Cuts> Partition::greedy(const std::vector<Seat>& seats, Time time) const {
  Cuts cuts{0};
  for (const Seat& seat : seats) cuts.push_back(reach(cuts.back(), seat, time));
  if (cuts.back() != units_) return std::nullopt;
  return cuts;
}

Time Partition::slowest(const std::vector<Seat>& seats, const Cuts& cuts) const {
  Time found = 0;
  for (std::size_t i = 0; i < seats.size(); ++i) {
    found = std::max(found, stage_time(cuts[i], cuts[i + 1], seats[i].speed_ppm));
  }
  return found;
}

std::optional<Cuts> Partition::cut(const std::vector<Seat>& seats, Time transfer) const {
  if (seats.empty()) return std::nullopt;
  std::int64_t least = seats[0].speed_ppm, together = 0;
  for (const Seat& seat : seats) {
    least = std::min(least, seat.speed_ppm);
    together += seat.speed_ppm;
  }
  std::optional<Cuts> best = greedy(seats, scaled(work_.back(), kPpm, least, false) + 1);
  if (!best) return std::nullopt;
  int used = 0;
  for (std::size_t i = 0; i < seats.size(); ++i) used += (*best)[i + 1] > (*best)[i];
  Time low = std::max<Time>(0, scaled(work_.back(), kPpm, together, false) - 1);
  Time high = slowest(seats, *best) + (used > 1 ? transfer : 0);
  while (low < high) {
    const Time middle = (low + high) / 2;
    if (std::optional<Cuts> found = greedy(seats, middle)) {
      best = std::move(found);
      high = std::min(middle, slowest(seats, *best));
    } else {
      low = middle + 1;
    }
  }
  return best;
}

std::optional<Cuts> Partition::nearest(const std::vector<Seat>& seats, Time time,
                                       const std::vector<std::vector<std::pair<int, int>>>& holds) const {
  if (holds.size() != seats.size()) throw std::invalid_argument("one list of held ranges for each cell is needed");
  struct Way {
    std::int64_t fetched = 0;
    Cuts cuts;  // empty: there is none
  };
  std::vector<Way> best(units_ + 1);
  best[0].cuts = {0};
  for (std::size_t i = 0; i < seats.size(); ++i) {
    std::vector<std::int64_t> lacking(units_ + 1, 0);  // prefix sums of the bytes this cell does not hold
    for (int unit = 0; unit < units_; ++unit) {
      const bool held = std::any_of(holds[i].begin(), holds[i].end(),
                                    [&](const auto& range) { return range.first <= unit && unit < range.second; });
      lacking[unit + 1] = lacking[unit] + (held ? 0 : moved_[unit + 1] - moved_[unit]);
    }
    std::vector<Way> onward(units_ + 1);
    for (int first = 0; first <= units_; ++first) {
      const Way& way = best[first];
      if (way.cuts.empty()) continue;
      const int furthest = reach(first, seats[i], time);
      for (int end = first; end <= furthest; ++end) {
        const std::int64_t fetched = way.fetched - lacking[first] + lacking[end];
        Way& known = onward[end];
        // Both end here: what was cut before decides.
        if (known.cuts.empty() || fetched < known.fetched ||
            (fetched == known.fetched && std::lexicographical_compare(way.cuts.begin(), way.cuts.end(),
                                                                      known.cuts.begin(), known.cuts.end() - 1))) {
          known.fetched = fetched;
          known.cuts = way.cuts;
          known.cuts.push_back(end);
        }
      }
    }
    best = std::move(onward);
  }
  if (best[units_].cuts.empty()) return std::nullopt;
  return std::move(best[units_].cuts);
}

}  // namespace elastic::plan
