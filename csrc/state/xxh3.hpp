// The 128-bit XXH3 of inputs beyond 240 bytes, with the default secret and no seed, block by block.
//
// Source: the xxHash specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3 Algorithm Overview", long
// inputs). The result is that of the library, which a test compares; it is here so that a pass over memory that does
// something else can hash as well, while the processor's caches hold what it reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "clones.hpp"

namespace elastic::state {

struct Hash128 {
  std::uint64_t low, high;
};

// The callers' bodies are compiled for several vector widths, and this with them.
class LongXxh3 {
 public:
  static constexpr std::size_t kShortest = 241;
  static constexpr std::size_t kBlock = 1024;

  // The next kBlock bytes. Not for the last ones: some are left for finish().
  ELASTIC_INLINE void block(const char* data) {
    accumulate(data, kBlock / kStripe);
    for (std::size_t i = 0; i < kLanes; ++i) {
      lanes_[i] = (lanes_[i] ^ (lanes_[i] >> 47) ^ secret(kSecretBytes - kStripe + 8 * i)) * kPrime32_1;
    }
  }

  // `rest`: what no block had, 1 to kBlock bytes of an input of `size`; the kStripe bytes before its end are read too.
  ELASTIC_INLINE Hash128 finish(const char* rest, std::size_t rest_size, std::size_t size) {
    accumulate(rest, (rest_size - 1) / kStripe);
    stripe(lanes_, rest + rest_size - kStripe, kSecret + kSecretBytes - kStripe - 7);
    return {merged(11, size * kPrime64_1), merged(kSecretBytes - kStripe - 11, ~(size * kPrime64_2))};
  }

 private:
  static constexpr std::size_t kStripe = 64, kLanes = 8, kSecretBytes = 192;
  static constexpr std::uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
  static constexpr std::uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu,
                                 kPrime64_3 = 0x165667B19E3779F9u, kPrime64_4 = 0x85EBCA77C2B2AE63u,
                                 kPrime64_5 = 0x27D4EB2F165667C5u;
  // Elsewhere, so that the compiler does not know its values: with them it does not vectorise.
  static const unsigned char kSecret[kSecretBytes];

  static std::uint64_t word(const void* at) {
    std::uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  static std::uint64_t secret(std::size_t at) { return word(kSecret + at); }

  ELASTIC_INLINE static void stripe(std::uint64_t* lanes, const char* data, const unsigned char* secret) {
    std::uint64_t values[kLanes], keyed[kLanes];
    std::memcpy(values, data, kStripe);
    std::memcpy(keyed, secret, kStripe);
    for (std::size_t i = 0; i < kLanes; ++i) keyed[i] ^= values[i];
    for (std::size_t i = 0; i < kLanes; ++i) {
      lanes[i] += values[i ^ 1] + std::uint64_t{std::uint32_t(keyed[i])} * std::uint64_t{std::uint32_t(keyed[i] >> 32)};
    }
  }

  // In a copy of the lanes, which the compiler keeps in registers.
  ELASTIC_INLINE void accumulate(const char* data, std::size_t stripes) {
    std::uint64_t lanes[kLanes];
    std::memcpy(lanes, lanes_, sizeof lanes);
    for (std::size_t n = 0; n < stripes; ++n) stripe(lanes, data + n * kStripe, kSecret + 8 * n);
    std::memcpy(lanes_, lanes, sizeof lanes);
  }

  std::uint64_t merged(std::size_t secret_at, std::uint64_t start) const {
    std::uint64_t result = start;
    for (std::size_t i = 0; i < kLanes; i += 2) {
      const auto product = static_cast<unsigned __int128>(lanes_[i] ^ secret(secret_at + 8 * i)) *
                           (lanes_[i + 1] ^ secret(secret_at + 8 * i + 8));
      result += std::uint64_t(product) ^ std::uint64_t(product >> 64);
    }
    result = (result ^ (result >> 37)) * 0x165667919E3779F9u;
    return result ^ (result >> 32);
  }

  std::uint64_t lanes_[kLanes] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                  kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
};

}  // namespace elastic::state
