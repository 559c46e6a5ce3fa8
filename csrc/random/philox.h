// Philox4x32-10 and the stream of one (seed, step, unit, site, sample).
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as
// 1, 2, 3" (SC 2011), section 3.3. Counter-based: block n of a stream is a pure
// function of (key, n), so any element of a mask can be formed anywhere, alone.
//
// Invariant: nothing here depends on the caller, or on the order or number of calls.
#pragma once

#include <array>
#include <cstdint>

namespace megatron_elastic::random {

constexpr uint32_t kMultiplier0 = 0xD2511F53u;
constexpr uint32_t kMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kWeyl0 = 0x9E3779B9u;
constexpr uint32_t kWeyl1 = 0xBB67AE85u;
constexpr int kRounds = 10;

using Block = std::array<uint32_t, 4>;
using Key = std::array<uint32_t, 2>;

inline Block philox4x32_10(Block counter, Key key) {
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t p0 = uint64_t{kMultiplier0} * counter[0];
    const uint64_t p1 = uint64_t{kMultiplier1} * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(p0)};
    key = {key[0] + kWeyl0, key[1] + kWeyl1};
  }
  return counter;
}

// The part of a dropout draw's name that all samples and coordinates of one use share.
struct Site {
  uint64_t seed;
  uint64_t step;
  uint32_t unit;
  uint32_t site;
};

// One sample's stream at one site: the Philox key, and counter words 2 and 3.
struct Stream {
  Key key;
  uint32_t word2;
  uint32_t word3;
};

// A first Philox block hashes (seed, step, unit, site) into 128 bits: 64 become
// the key, 64 whiten the sample number. Philox is a bijection of the counter for
// a fixed key, so two sites of one seed never get the same 128 bits.
inline Stream stream_of(const Site& at, uint64_t sample) {
  const Block d =
      philox4x32_10({static_cast<uint32_t>(at.step), static_cast<uint32_t>(at.step >> 32), at.unit, at.site},
                    {static_cast<uint32_t>(at.seed), static_cast<uint32_t>(at.seed >> 32)});
  return {{d[0], d[1]}, d[2] ^ static_cast<uint32_t>(sample), d[3] ^ static_cast<uint32_t>(sample >> 32)};
}

}  // namespace megatron_elastic::random
