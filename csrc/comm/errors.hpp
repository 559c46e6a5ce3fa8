// Errors as types; each has its twin in megatron/elastic/comm/errors.py.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace elastic::comm {

struct CommError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The link to `rank` broke while something was in flight on it. `heard`: another member's did, ours stands. `silent`:
// ranks, among them `rank`, whose hosts answered nothing when links to them were opened.
struct PeerLost : CommError {
  PeerLost(int rank_, std::string why_, bool heard_ = false, std::vector<int> silent_ = {})
      : CommError("rank " + std::to_string(rank_) + ": " + why_),
        rank(rank_),
        why(std::move(why_)),
        heard(heard_),
        silent(std::move(silent_)) {}
  int rank;
  std::string why;
  bool heard;
  std::vector<int> silent;
};

// A newer generation was frozen; the caller's work belongs to an older one.
struct GenerationChanged : CommError {
  explicit GenerationChanged(uint64_t generation_)
      : CommError("generation " + std::to_string(generation_) + " is being agreed"), generation(generation_) {}
  uint64_t generation;
};

// Nothing arrived within the time allowed from `ranks`.
struct Timeout : CommError {
  Timeout(double seconds_, std::vector<int> ranks_)
      : CommError("timed out after " + std::to_string(seconds_) + " s"), seconds(seconds_), ranks(std::move(ranks_)) {}
  double seconds;
  std::vector<int> ranks;
};

}  // namespace elastic::comm
