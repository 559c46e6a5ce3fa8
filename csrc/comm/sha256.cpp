#include "sha256.hpp"

#include <cstring>

namespace elastic::comm {
namespace {

constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

inline uint32_t rotate(uint32_t x, int n) {
  return (x >> n) | (x << (32 - n));
}

}  // namespace

Sha256::Sha256()
    : state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19} {}

void Sha256::block(const uint8_t* p) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = uint32_t(p[4 * i]) << 24 | uint32_t(p[4 * i + 1]) << 16 | uint32_t(p[4 * i + 2]) << 8 | p[4 * i + 3];
  }
  for (int i = 16; i < 64; ++i) {
    const uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto s = state_;
  for (int i = 0; i < 64; ++i) {
    const uint32_t e1 = rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25);
    const uint32_t choose = (s[4] & s[5]) ^ (~s[4] & s[6]);
    const uint32_t t1 = s[7] + e1 + choose + kRound[i] + w[i];
    const uint32_t e0 = rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22);
    const uint32_t majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
    s = {t1 + e0 + majority, s[0], s[1], s[2], s[3] + t1, s[4], s[5], s[6]};
  }
  for (int i = 0; i < 8; ++i) state_[i] += s[i];
}

void Sha256::update(const void* data, size_t size) {
  const auto* p = static_cast<const uint8_t*>(data);
  size_t used = total_ % 64;
  total_ += size;
  while (size > 0) {
    const size_t take = size < 64 - used ? size : 64 - used;
    std::memcpy(buffer_.data() + used, p, take);
    p += take;
    size -= take;
    used += take;
    if (used == 64) {
      block(buffer_.data());
      used = 0;
    }
  }
}

Digest Sha256::finish() {
  const uint64_t bits = total_ * 8;
  const uint8_t one = 0x80;
  const uint8_t zero = 0;
  update(&one, 1);
  while (total_ % 64 != 56) update(&zero, 1);
  uint8_t length[8];
  for (int i = 0; i < 8; ++i) length[i] = uint8_t(bits >> (56 - 8 * i));
  update(length, 8);
  Digest out;
  for (int i = 0; i < 32; ++i) out[i] = uint8_t(state_[i / 4] >> (24 - 8 * (i % 4)));
  return out;
}

Digest sha256(const void* data, size_t size) {
  Sha256 hash;
  hash.update(data, size);
  return hash.finish();
}

Digest hmac_sha256(const std::string& key, const void* data, size_t size) {
  std::array<uint8_t, 64> pad{};
  if (key.size() > 64) {
    const Digest shortened = sha256(key.data(), key.size());
    std::memcpy(pad.data(), shortened.data(), shortened.size());
  } else {
    std::memcpy(pad.data(), key.data(), key.size());
  }
  auto inner_pad = pad;
  auto outer_pad = pad;
  for (auto& b : inner_pad) b ^= 0x36;
  for (auto& b : outer_pad) b ^= 0x5c;
  Sha256 inner;
  inner.update(inner_pad.data(), 64);
  inner.update(data, size);
  const Digest middle = inner.finish();
  Sha256 outer;
  outer.update(outer_pad.data(), 64);
  outer.update(middle.data(), middle.size());
  return outer.finish();
}

bool equal_constant_time(const Digest& a, const Digest& b) {
  uint8_t different = 0;
  for (size_t i = 0; i < a.size(); ++i) different |= uint8_t(a[i] ^ b[i]);
  return different == 0;
}

}  // namespace elastic::comm
