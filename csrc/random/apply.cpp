// See apply.h. One loop body a type; vector forms for the types that training uses.
#include "apply.h"

#include <cstring>

#if MEGATRON_ELASTIC_X86
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12's own AVX-512 headers (its bug 105593)
#endif
#include <immintrin.h>
#endif

namespace megatron_elastic::random {
namespace {

inline bool kept(const uint64_t* bits, size_t i) {
  return bits[i >> 6] >> (i & 63) & 1;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

struct Bfloat16 {
  static float load(uint16_t raw) { return float_of(uint32_t{raw} << 16); }
  static uint16_t store(float value) {
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
    return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
  }
};

struct Float16 {
  static float load(uint16_t raw) {
    const uint32_t sign = uint32_t{raw & 0x8000u} << 16;
    const uint32_t exponent = raw >> 10 & 0x1Fu;
    const uint32_t mantissa = raw & 0x3FFu;
    if (exponent == 0x1F) return float_of(sign | 0x7F800000u | mantissa << 13);
    if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // subnormal: exact
    return float_of(sign | bits_of(magnitude));
  }
  static uint16_t store(float value) {
    const uint32_t bits = bits_of(value);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return sign | 0x7E00;
    if (magnitude >= 0x477FF000u) return sign | 0x7C00;  // rounds to 65536 or more
    if (magnitude < 0x38800000u) {                       // below the smallest normal: units of 2^-24
      // Adding 2^-1 aligns units of 2^-24 with the mantissa; the hardware rounds to nearest even.
      return sign | static_cast<uint16_t>(bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f));
    }
    const uint32_t rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1u);
    return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
  }
};

template <class Half>
void generic_half(const uint64_t* bits, size_t n, const uint16_t* src, const uint16_t* residual, uint16_t* dst,
                  float scale, size_t from = 0) {
  for (size_t i = from; i < n; ++i) {
    uint16_t y = kept(bits, i) ? Half::store(Half::load(src[i]) * scale) : uint16_t{0};
    if (residual) y = Half::store(Half::load(residual[i]) + Half::load(y));
    dst[i] = y;
  }
}

template <class Real>
void generic_real(const uint64_t* bits, size_t n, const Real* src, const Real* residual, Real* dst, Real scale,
                  size_t from = 0) {
  if (residual) {
    for (size_t i = from; i < n; ++i) dst[i] = residual[i] + (kept(bits, i) ? src[i] * scale : Real{0});
  } else {
    for (size_t i = from; i < n; ++i) dst[i] = kept(bits, i) ? src[i] * scale : Real{0};
  }
}

#if MEGATRON_ELASTIC_X86

inline uint32_t bits_at(const uint64_t* bits, size_t i, int width) {
  return static_cast<uint32_t>(bits[i >> 6] >> (i & 63)) & ((1u << width) - 1);
}

// --- AVX-512 -----------------------------------------------------------------

MEGATRON_ELASTIC_AVX512 void float_avx512(const uint64_t* bits, size_t n, const float* src, const float* residual,
                                          float* dst, float scale) {
  const __m512 factor = _mm512_set1_ps(scale);
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __mmask16 keep = static_cast<__mmask16>(bits_at(bits, i, 16));
    __m512 y = _mm512_maskz_mul_ps(keep, _mm512_loadu_ps(src + i), factor);
    if (residual) y = _mm512_add_ps(_mm512_loadu_ps(residual + i), y);
    _mm512_storeu_ps(dst + i, y);
  }
  generic_real(bits, n, src, residual, dst, scale, i);
}

MEGATRON_ELASTIC_AVX512 inline __m512 load_bf16(const uint16_t* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

// Round to nearest even in integers: the processor's own conversion flushes subnormals.
MEGATRON_ELASTIC_AVX512 inline __m256i round_bf16(__m512 value) {
  const __m512i raw = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(raw, 16), _mm512_set1_epi32(1));
  __m512i y = _mm512_add_epi32(raw, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  y = _mm512_srli_epi32(y, 16);
  y = _mm512_mask_mov_epi32(y, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
  return _mm512_cvtepi32_epi16(y);
}

MEGATRON_ELASTIC_AVX512 void bf16_avx512(const uint64_t* bits, size_t n, const uint16_t* src, const uint16_t* residual,
                                         uint16_t* dst, float scale) {
  const __m512 factor = _mm512_set1_ps(scale);
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __mmask16 keep = static_cast<__mmask16>(bits_at(bits, i, 16));
    __m256i y = round_bf16(_mm512_maskz_mul_ps(keep, load_bf16(src + i), factor));
    if (residual) {
      const __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(y), 16));
      y = round_bf16(_mm512_add_ps(load_bf16(residual + i), wide));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), y);
  }
  generic_half<Bfloat16>(bits, n, src, residual, dst, scale, i);
}

constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

MEGATRON_ELASTIC_AVX512 void fp16_avx512(const uint64_t* bits, size_t n, const uint16_t* src, const uint16_t* residual,
                                         uint16_t* dst, float scale) {
  const __m512 factor = _mm512_set1_ps(scale);
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __mmask16 keep = static_cast<__mmask16>(bits_at(bits, i, 16));
    const __m512 x = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i)));
    __m256i y = _mm512_cvtps_ph(_mm512_maskz_mul_ps(keep, x, factor), kNearestEven);
    if (residual) {
      const __m512 r = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(residual + i)));
      y = _mm512_cvtps_ph(_mm512_add_ps(r, _mm512_cvtph_ps(y)), kNearestEven);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), y);
  }
  generic_half<Float16>(bits, n, src, residual, dst, scale, i);
}

// --- AVX2 --------------------------------------------------------------------

MEGATRON_ELASTIC_AVX2 inline __m256 lanes_of(uint32_t bits) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int32_t>(bits)), each);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, each));
}

MEGATRON_ELASTIC_AVX2 void float_avx2(const uint64_t* bits, size_t n, const float* src, const float* residual,
                                      float* dst, float scale) {
  const __m256 factor = _mm256_set1_ps(scale);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 y = _mm256_and_ps(_mm256_mul_ps(_mm256_loadu_ps(src + i), factor), lanes_of(bits_at(bits, i, 8)));
    if (residual) y = _mm256_add_ps(_mm256_loadu_ps(residual + i), y);
    _mm256_storeu_ps(dst + i, y);
  }
  generic_real(bits, n, src, residual, dst, scale, i);
}

MEGATRON_ELASTIC_AVX2 inline __m256 widen_bf16(__m128i raw) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}

MEGATRON_ELASTIC_AVX2 inline __m128i round_bf16(__m256 value) {
  const __m256i raw = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(raw, 16), _mm256_set1_epi32(1));
  __m256i y = _mm256_srli_epi32(_mm256_add_epi32(raw, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  y = _mm256_blendv_epi8(y, _mm256_set1_epi32(0x7FC0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
}

MEGATRON_ELASTIC_AVX2 void bf16_avx2(const uint64_t* bits, size_t n, const uint16_t* src, const uint16_t* residual,
                                     uint16_t* dst, float scale) {
  const __m256 factor = _mm256_set1_ps(scale);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 x = widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i)));
    __m128i y = round_bf16(_mm256_and_ps(_mm256_mul_ps(x, factor), lanes_of(bits_at(bits, i, 8))));
    if (residual) {
      const __m256 r = widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(residual + i)));
      y = round_bf16(_mm256_add_ps(r, widen_bf16(y)));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), y);
  }
  generic_half<Bfloat16>(bits, n, src, residual, dst, scale, i);
}

MEGATRON_ELASTIC_AVX2 void fp16_avx2(const uint64_t* bits, size_t n, const uint16_t* src, const uint16_t* residual,
                                     uint16_t* dst, float scale) {
  const __m256 factor = _mm256_set1_ps(scale);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 x = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i)));
    __m128i y = _mm256_cvtps_ph(_mm256_and_ps(_mm256_mul_ps(x, factor), lanes_of(bits_at(bits, i, 8))),
                                _MM_FROUND_TO_NEAREST_INT);
    if (residual) {
      const __m256 r = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(residual + i)));
      y = _mm256_cvtps_ph(_mm256_add_ps(r, _mm256_cvtph_ps(y)), _MM_FROUND_TO_NEAREST_INT);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), y);
  }
  generic_half<Float16>(bits, n, src, residual, dst, scale, i);
}

#endif  // MEGATRON_ELASTIC_X86

void apply_float(Isa isa, const uint64_t* bits, size_t n, const float* x, const float* r, float* y, float scale) {
#if MEGATRON_ELASTIC_X86
  if (isa == Isa::kAvx512) return float_avx512(bits, n, x, r, y, scale);
  if (isa == Isa::kAvx2) return float_avx2(bits, n, x, r, y, scale);
#endif
  (void)isa;
  generic_real(bits, n, x, r, y, scale);
}

void apply_bf16(Isa isa, const uint64_t* bits, size_t n, const uint16_t* x, const uint16_t* r, uint16_t* y, float s) {
#if MEGATRON_ELASTIC_X86
  if (isa == Isa::kAvx512) return bf16_avx512(bits, n, x, r, y, s);
  if (isa == Isa::kAvx2) return bf16_avx2(bits, n, x, r, y, s);
#endif
  (void)isa;
  generic_half<Bfloat16>(bits, n, x, r, y, s);
}

void apply_fp16(Isa isa, const uint64_t* bits, size_t n, const uint16_t* x, const uint16_t* r, uint16_t* y, float s) {
#if MEGATRON_ELASTIC_X86
  if (isa == Isa::kAvx512) return fp16_avx512(bits, n, x, r, y, s);
  if (isa == Isa::kAvx2) return fp16_avx2(bits, n, x, r, y, s);
#endif
  (void)isa;
  generic_half<Float16>(bits, n, x, r, y, s);
}

template <class T>
const T* as(const void* p) {
  return static_cast<const T*>(p);
}

}  // namespace

void apply_bits(Isa isa, Dtype dtype, const uint64_t* bits, size_t n, const void* src, const void* residual, void* dst,
                double scale) {
  const float narrow = static_cast<float>(scale);
  switch (dtype) {
    case Dtype::kFloat32:
      return apply_float(isa, bits, n, as<float>(src), as<float>(residual), static_cast<float*>(dst), narrow);
    case Dtype::kBfloat16:
      return apply_bf16(isa, bits, n, as<uint16_t>(src), as<uint16_t>(residual), static_cast<uint16_t*>(dst), narrow);
    case Dtype::kFloat16:
      return apply_fp16(isa, bits, n, as<uint16_t>(src), as<uint16_t>(residual), static_cast<uint16_t*>(dst), narrow);
    case Dtype::kFloat64:
      return generic_real(bits, n, as<double>(src), as<double>(residual), static_cast<double*>(dst), scale);
  }
}

}  // namespace megatron_elastic::random
