#include "fixed_point.hpp"

#include <algorithm>
#include <cstring>

#include "clones.hpp"
#include "float_mode.hpp"

namespace elastic::state {
namespace {

constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves the integer in the low bits
constexpr std::size_t kRun = 128;              // elements that are looked at for zeros together
constexpr std::uint32_t kInfinity = 0x7f800000u;

ELASTIC_INLINE std::int64_t bits(double value) {
  std::int64_t word;
  std::memcpy(&word, &value, sizeof word);
  return word;
}

ELASTIC_INLINE std::int64_t rounded(float value, double scale) {
  return bits(static_cast<double>(value) * scale + kMagic) - bits(kMagic);
}

// The largest magnitude as bits: those of finite numbers are ordered as the numbers are, NaN comes after infinity.
ELASTIC_INLINE std::uint32_t largest_of(const float* grad, std::size_t count) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t word;
    std::memcpy(&word, grad + i, sizeof word);
    word &= 0x7fffffffu;
    largest = word > largest ? word : largest;
  }
  return largest;
}

ELASTIC_INLINE std::uint32_t add_run(const float* __restrict grad, std::int64_t* __restrict sum, std::size_t count,
                                     double scale) {
  const std::uint32_t largest = largest_of(grad, count);
  if (largest > 0) {
    for (std::size_t i = 0; i < count; ++i) sum[i] += rounded(grad[i], scale);
  }
  return largest;
}

ELASTIC_INLINE std::uint32_t set_run(const float* __restrict grad, std::int64_t* __restrict sum, std::size_t count,
                                     double scale) {
  const std::uint32_t largest = largest_of(grad, count);
  for (std::size_t i = 0; i < count; ++i) sum[i] = rounded(grad[i], scale);
  return largest;
}

// Both return the largest magnitude of all. Runs of a fixed length let the compiler unroll them.
ELASTIC_CLONES
std::uint32_t add_all(const float* __restrict grad, std::int64_t* __restrict sum, std::size_t count, double scale) {
  std::uint32_t largest = 0;
  std::size_t at = 0;
  for (; at + kRun <= count; at += kRun) largest = std::max(largest, add_run(grad + at, sum + at, kRun, scale));
  return std::max(largest, add_run(grad + at, sum + at, count - at, scale));
}

ELASTIC_CLONES
std::uint32_t set_all(const float* __restrict grad, std::int64_t* __restrict sum, std::size_t count, double scale) {
  std::uint32_t largest = 0;
  std::size_t at = 0;
  for (; at + kRun <= count; at += kRun) largest = std::max(largest, set_run(grad + at, sum + at, kRun, scale));
  return std::max(largest, set_run(grad + at, sum + at, count - at, scale));
}

ELASTIC_CLONES
void unfold_all(const std::int64_t* __restrict sum, float* __restrict out, std::size_t count, double inverse) {
  for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<float>(static_cast<double>(sum[i]) * inverse);
}

}  // namespace

unsigned fold(const float* grad, std::int64_t* sum, std::size_t count, double scale, double limit, bool first) {
  const DefaultFloatMode mode;
  const std::uint32_t largest = (first ? set_all : add_all)(grad, sum, count, scale);
  if (largest >= kInfinity) return kFoldNotFinite;
  float magnitude;
  std::memcpy(&magnitude, &largest, sizeof magnitude);
  return static_cast<double>(magnitude) * scale < limit ? 0u : kFoldOutOfRange;
}

void unfold(const std::int64_t* sum, float* out, std::size_t count, double scale) {
  const DefaultFloatMode mode;
  unfold_all(sum, out, count, 1.0 / scale);
}

}  // namespace elastic::state
