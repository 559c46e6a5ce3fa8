#include "fixed_point.hpp"

#include <cstring>

#include "clones.hpp"
#include "float_mode.hpp"

namespace elastic::state {
namespace {

constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves the integer in the low bits

inline std::int64_t bits(double value) {
  std::int64_t word;
  std::memcpy(&word, &value, sizeof word);
  return word;
}

// Counts instead of branches, so that the loop is vectorised.
ELASTIC_CLONES
unsigned fold_all(float* __restrict grad, std::int64_t* __restrict sum, std::size_t count, double scale, double limit) {
  const std::int64_t magic = bits(kMagic);
  std::int64_t outside = 0, strange = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double x = static_cast<double>(grad[i]) * scale;
    outside += !(__builtin_fabs(x) < limit);
    strange += !(__builtin_fabs(x) <= 1.7976931348623157e308);
    sum[i] += bits(x + kMagic) - magic;
    grad[i] = 0.0f;
  }
  if (strange > 0) return kFoldNotFinite;
  return outside > 0 ? kFoldOutOfRange : 0u;
}

ELASTIC_CLONES
void unfold_all(const std::int64_t* __restrict sum, float* __restrict out, std::size_t count, double inverse) {
  for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<float>(static_cast<double>(sum[i]) * inverse);
}

}  // namespace

unsigned fold(float* grad, std::int64_t* sum, std::size_t count, double scale, double limit) {
  const DefaultFloatMode mode;
  return fold_all(grad, sum, count, scale, limit);
}

void unfold(const std::int64_t* sum, float* out, std::size_t count, double scale) {
  const DefaultFloatMode mode;
  unfold_all(sum, out, count, 1.0 / scale);
}

}  // namespace elastic::state
