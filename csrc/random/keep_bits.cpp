// Philox blocks, as many side by side as a register holds. See keep_bits.h.
//
// The vector forms keep a 32-bit word in the low half of each 64-bit lane:
// the widening multiply reads only that half, its product's low half is the next
// word unchanged, and the high half needs one shift. What is left in the upper
// half of a lane is never read.
#include "keep_bits.h"

#if MEGATRON_ELASTIC_X86
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12's own AVX-512 headers (its bug 105593)
#endif
#include <immintrin.h>
#endif

namespace megatron_elastic::random {
namespace {

struct Schedule {
  uint32_t k0[kRounds];
  uint32_t k1[kRounds];

  explicit Schedule(const Key& key) {
    for (uint32_t round = 0; round < kRounds; ++round) {
      k0[round] = key[0] + round * kWeyl0;
      k1[round] = key[1] + round * kWeyl1;
    }
  }
};

// Sixteen blocks as arrays of words: a shape compilers vectorise on any machine.
void generic(const Stream& stream, const Schedule& keys, uint64_t first, size_t count, uint32_t below, uint64_t* out) {
  for (size_t g = 0; g < count; ++g) {
    const uint64_t block = (first + g) * 16;
    uint32_t c0[16], c1[16], c2[16], c3[16];
    for (uint32_t i = 0; i < 16; ++i) {
      c0[i] = static_cast<uint32_t>(block) + i;
      c1[i] = static_cast<uint32_t>(block >> 32);
      c2[i] = stream.word2;
      c3[i] = stream.word3;
    }
    for (int round = 0; round < kRounds; ++round) {
      for (int i = 0; i < 16; ++i) {
        const uint64_t p0 = uint64_t{kMultiplier0} * c0[i];
        const uint64_t p1 = uint64_t{kMultiplier1} * c2[i];
        c0[i] = static_cast<uint32_t>(p1 >> 32) ^ c1[i] ^ keys.k0[round];
        c1[i] = static_cast<uint32_t>(p1);
        c2[i] = static_cast<uint32_t>(p0 >> 32) ^ c3[i] ^ keys.k1[round];
        c3[i] = static_cast<uint32_t>(p0);
      }
    }
    uint64_t mask = 0;
    for (int i = 0; i < 16; ++i) {
      mask |= uint64_t{c0[i] >= below} << i | uint64_t{c1[i] >= below} << (16 + i) |
              uint64_t{c2[i] >= below} << (32 + i) | uint64_t{c3[i] >= below} << (48 + i);
    }
    out[g] = mask;
  }
}

#if MEGATRON_ELASTIC_X86

struct Words256 {
  __m256i c0, c1, c2, c3;
};

MEGATRON_ELASTIC_AVX2 inline void round256(Words256& c, __m256i k0, __m256i k1, __m256i m0, __m256i m1) {
  const __m256i p0 = _mm256_mul_epu32(c.c0, m0);
  const __m256i p1 = _mm256_mul_epu32(c.c2, m1);
  c.c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c.c1), k0);
  c.c1 = p1;
  c.c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c.c3), k1);
  c.c3 = p0;
}

// Words of eight blocks (even ones in one register, odd ones in the other) → eight mask bits.
MEGATRON_ELASTIC_AVX2 inline uint64_t kept256(__m256i even, __m256i odd, __m256i below_biased) {
  const __m256i words = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  const __m256i biased = _mm256_xor_si256(words, _mm256_set1_epi32(INT32_MIN));
  const __m256i dropped = _mm256_cmpgt_epi32(below_biased, biased);
  return static_cast<uint8_t>(~_mm256_movemask_ps(_mm256_castsi256_ps(dropped)));
}

MEGATRON_ELASTIC_AVX2 void avx2(const Stream& stream, const Schedule& keys, uint64_t first, size_t count,
                                uint32_t below, uint64_t* out) {
  const __m256i m0 = _mm256_set1_epi64x(kMultiplier0), m1 = _mm256_set1_epi64x(kMultiplier1);
  const __m256i limit = _mm256_set1_epi32(static_cast<int32_t>(below ^ 0x80000000u));
  const __m256i w2 = _mm256_set1_epi64x(stream.word2), w3 = _mm256_set1_epi64x(stream.word3);
  for (size_t g = 0; g < count; ++g) {
    const uint64_t block = (first + g) * 16;
    const __m256i hi = _mm256_set1_epi64x(static_cast<uint32_t>(block >> 32));
    uint64_t mask = 0;
    for (int half = 0; half < 2; ++half) {
      const uint32_t lo = static_cast<uint32_t>(block) + 8 * static_cast<uint32_t>(half);
      Words256 even{_mm256_setr_epi64x(lo, lo + 2, lo + 4, lo + 6), hi, w2, w3};
      Words256 odd{_mm256_setr_epi64x(lo + 1, lo + 3, lo + 5, lo + 7), hi, w2, w3};
      for (int r = 0; r < kRounds; ++r) {
        const __m256i k0 = _mm256_set1_epi64x(keys.k0[r]), k1 = _mm256_set1_epi64x(keys.k1[r]);
        round256(even, k0, k1, m0, m1);
        round256(odd, k0, k1, m0, m1);
      }
      const int at = 8 * half;
      mask |= kept256(even.c0, odd.c0, limit) << at | kept256(even.c1, odd.c1, limit) << (16 + at) |
              kept256(even.c2, odd.c2, limit) << (32 + at) | kept256(even.c3, odd.c3, limit) << (48 + at);
    }
    out[g] = mask;
  }
}

struct Words512 {
  __m512i c0, c1, c2, c3;
};

MEGATRON_ELASTIC_AVX512 inline void round512(Words512& c, __m512i k0, __m512i k1, __m512i m0, __m512i m1) {
  const __m512i p0 = _mm512_mul_epu32(c.c0, m0);
  const __m512i p1 = _mm512_mul_epu32(c.c2, m1);
  c.c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c.c1, k0, 0x96);  // a ^ b ^ c
  c.c1 = p1;
  c.c2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c.c3, k1, 0x96);
  c.c3 = p0;
}

MEGATRON_ELASTIC_AVX512 inline uint64_t kept512(__m512i even, __m512i odd, __m512i below) {
  const __m512i words = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  return _mm512_cmpge_epu32_mask(words, below);
}

MEGATRON_ELASTIC_AVX512 void avx512(const Stream& stream, const Schedule& keys, uint64_t first, size_t count,
                                    uint32_t below, uint64_t* out) {
  const __m512i m0 = _mm512_set1_epi64(kMultiplier0), m1 = _mm512_set1_epi64(kMultiplier1);
  const __m512i limit = _mm512_set1_epi32(static_cast<int32_t>(below));
  const __m512i w2 = _mm512_set1_epi64(stream.word2), w3 = _mm512_set1_epi64(stream.word3);
  const __m512i evens = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
  const __m512i odds = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
  for (size_t g = 0; g < count; ++g) {
    const uint64_t block = (first + g) * 16;
    const __m512i lo = _mm512_set1_epi64(static_cast<uint32_t>(block));
    const __m512i hi = _mm512_set1_epi64(static_cast<uint32_t>(block >> 32));
    Words512 even{_mm512_add_epi64(lo, evens), hi, w2, w3};
    Words512 odd{_mm512_add_epi64(lo, odds), hi, w2, w3};
    for (int r = 0; r < kRounds; ++r) {
      const __m512i k0 = _mm512_set1_epi64(keys.k0[r]), k1 = _mm512_set1_epi64(keys.k1[r]);
      round512(even, k0, k1, m0, m1);
      round512(odd, k0, k1, m0, m1);
    }
    out[g] = kept512(even.c0, odd.c0, limit) | kept512(even.c1, odd.c1, limit) << 16 |
             kept512(even.c2, odd.c2, limit) << 32 | kept512(even.c3, odd.c3, limit) << 48;
  }
}

#endif  // MEGATRON_ELASTIC_X86

}  // namespace

void keep_bits(Isa isa, const Stream& stream, uint64_t first, size_t count, uint32_t drop_below, uint64_t* out) {
  const Schedule keys(stream.key);
#if MEGATRON_ELASTIC_X86
  if (isa == Isa::kAvx512) return avx512(stream, keys, first, count, drop_below, out);
  if (isa == Isa::kAvx2) return avx2(stream, keys, first, count, drop_below, out);
#endif
  (void)isa;
  generic(stream, keys, first, count, drop_below, out);
}

}  // namespace megatron_elastic::random
