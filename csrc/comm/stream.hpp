// Copies past the cache, for results larger than it: the lines of the target are
// neither read first nor do they push out what others will read next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace elastic::comm {

// As memcpy. Worth it when the target will not be read again soon.
inline void copy_past_cache(char* to, const char* from, size_t size) {
#if defined(__x86_64__)
  const size_t before = (64 - (reinterpret_cast<uintptr_t>(to) & 63)) & 63;
  if (size < 4096) {
    std::memcpy(to, from, size);
    return;
  }
  std::memcpy(to, from, before);
  to += before, from += before, size -= before;
  for (; size >= 64; to += 64, from += 64, size -= 64) {
    const auto* in = reinterpret_cast<const __m128i*>(from);
    auto* out = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  _mm_sfence();
#endif
  std::memcpy(to, from, size);
}

}  // namespace elastic::comm
