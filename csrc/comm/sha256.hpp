// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), for the handshake of links.
//
// Small on purpose: a few hundred bytes are hashed per link, once in its life.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace elastic::comm {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  Sha256();
  void update(const void* data, size_t size);
  Digest finish();

 private:
  void block(const uint8_t* bytes);
  std::array<uint32_t, 8> state_;
  std::array<uint8_t, 64> buffer_{};
  uint64_t total_ = 0;
};

Digest sha256(const void* data, size_t size);
Digest hmac_sha256(const std::string& key, const void* data, size_t size);

// Compares without leaking where the first difference is.
bool equal_constant_time(const Digest& a, const Digest& b);

}  // namespace elastic::comm
