#include "matching.hpp"

#include <stdexcept>

namespace elastic::plan {

namespace {

using Wide = __int128;  // a weight times the cube of the number of takers passes 64 bits

class Hungarian {
 public:
  Hungarian(const std::vector<std::vector<std::int64_t>>& weights, const std::vector<int>& seats,
            const std::vector<int>& takers, bool in_order)
      : seats_(seats), takers_(takers), in_order_(in_order) {
    const Wide count = static_cast<Wide>(takers.size());
    const Wide scale = in_order ? count * count * count : 1;  // more than all distances together
    for (const auto& row : weights) {
      auto& costs = costs_.emplace_back();
      for (std::int64_t weight : row) costs.push_back(-weight * scale);
    }
    of_seat_.resize(seats.size() + 1);
    of_taker_.resize(takers.size() + 1);
    seat_of_.resize(takers.size() + 1);
  }

  std::vector<int> run() {
    for (std::size_t seat = 1; seat <= seats_.size(); ++seat) {
      seat_of_[0] = static_cast<int>(seat);
      augment();
    }
    std::vector<int> found(seats_.size());
    for (std::size_t taker = 1; taker < seat_of_.size(); ++taker) {
      if (seat_of_[taker]) found[seat_of_[taker] - 1] = static_cast<int>(taker) - 1;
    }
    return found;
  }

 private:
  // Seats and takers are counted from 1.
  Wide cost(int seat, std::size_t taker) const {
    const Wide apart = in_order_ ? seat - static_cast<Wide>(taker) : 0;
    return costs_[seats_[seat - 1]][takers_[taker - 1]] + apart * apart;
  }

  // Matches the seat `seat_of_[0]` along the shortest augmenting path; adjusts potentials and pairs.
  void augment() {
    const std::size_t count = takers_.size() + 1;
    std::vector<Wide> slack(count);
    std::vector<std::size_t> before(count);
    std::vector<char> known(count), done(count);
    std::size_t at = 0;
    while (seat_of_[at]) {
      done[at] = 1;
      const int seat = seat_of_[at];
      std::size_t nearest = 0;
      for (std::size_t taker = 1; taker < count; ++taker) {
        if (done[taker]) continue;
        const Wide reduced = cost(seat, taker) - of_seat_[seat] - of_taker_[taker];
        if (!known[taker] || reduced < slack[taker]) {
          known[taker] = 1;
          slack[taker] = reduced;
          before[taker] = at;
        }
        if (!nearest || slack[taker] < slack[nearest]) nearest = taker;
      }
      const Wide least = slack[nearest];
      for (std::size_t taker = 0; taker < count; ++taker) {
        if (done[taker]) {
          of_seat_[seat_of_[taker]] += least;
          of_taker_[taker] -= least;
        } else {
          slack[taker] -= least;
        }
      }
      at = nearest;
    }
    while (at) {
      seat_of_[at] = seat_of_[before[at]];
      at = before[at];
    }
  }

  const std::vector<int>&seats_, &takers_;
  const bool in_order_;
  std::vector<std::vector<Wide>> costs_;  // by kinds
  std::vector<Wide> of_seat_, of_taker_;  // potentials: at most the cost of a pair together, and equal to it if matched
  std::vector<int> seat_of_;  // of entry 0: the seat that looks for a taker; 0: none
};

}  // namespace

std::vector<int> matching(const std::vector<std::vector<std::int64_t>>& weights, const std::vector<int>& seats,
                          const std::vector<int>& takers, bool in_order) {
  if (takers.size() < seats.size()) throw std::invalid_argument("there are fewer takers than seats");
  for (int seat : seats) {
    if (seat < 0 || seat >= static_cast<int>(weights.size()))
      throw std::invalid_argument("a seat's kind has no weights");
  }
  for (const auto& row : weights) {
    for (int taker : takers) {
      if (taker < 0 || taker >= static_cast<int>(row.size()))
        throw std::invalid_argument("a taker's kind has no weight");
    }
  }
  return Hungarian(weights, seats, takers, in_order).run();
}

}  // namespace elastic::plan
