#include "intake.hpp"

#include "clones.hpp"
#include "float_mode.hpp"
#include "squares.hpp"

namespace elastic::state {
namespace {

constexpr std::size_t kPiece = LongXxh3::kBlock / sizeof(float);
static_assert(kPiece % kLanes == 0, "so that an element's lane does not depend on pieces");

// `piece(at, count)` is called for each piece before it is hashed.
template <typename Piece>
ELASTIC_INLINE Hash128 hashed(const float* values, std::size_t count, const Piece& piece) {
  LongXxh3 hash;
  std::size_t at = 0;
  for (; at + kPiece < count; at += kPiece) {
    piece(at, kPiece);
    hash.block(reinterpret_cast<const char*>(values + at));
  }
  piece(at, count - at);
  const auto* rest = reinterpret_cast<const char*>(values + at);
  return hash.finish(rest, (count - at) * sizeof(float), count * sizeof(float));
}

ELASTIC_CLONES
Hash128 copied(const float* __restrict from, float* __restrict to, std::size_t count, double* __restrict lanes) {
  return hashed(from, count, [&](std::size_t at, std::size_t size) {
    std::memcpy(to + at, from + at, size * sizeof(float));
    add_squares(from + at, size / kLanes, lanes);
    add_last_squares(from + at, size, lanes);
  });
}

ELASTIC_CLONES
Hash128 read(const float* values, std::size_t count) {
  return hashed(values, count, [](std::size_t, std::size_t) {});
}

}  // namespace

Intake take_in(const float* from, float* to, std::size_t count) {
  const DefaultFloatMode mode;
  double lanes[kLanes] = {};
  const Hash128 hash = copied(from, to, count, lanes);
  return {hash, sum_of_lanes(lanes)};
}

Hash128 hash_of(const float* values, std::size_t count) {
  return read(values, count);
}

}  // namespace elastic::state
