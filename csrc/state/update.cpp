#include "update.hpp"

#include <cstring>

#include "clones.hpp"
#include "float_mode.hpp"
#include "squares.hpp"

#if defined(__FAST_MATH__)
#error "the state kernels need IEEE arithmetic: build without -ffast-math"
#endif
// Build with -ffp-contract=off (bits), and -fno-math-errno -fno-trapping-math (only
// then does GCC vectorise square roots; same bits, a tenth of the time).

namespace elastic::state {
namespace {

inline std::uint16_t bf16_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const auto rounded = static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  return (bits & 0x7fffffffu) > 0x7f800000u ? std::uint16_t{0x7fc0} : rounded;
}

ELASTIC_CLONES
void adam_decoupled(float* __restrict master, float* __restrict exp_avg, float* __restrict exp_avg_sq,
                    const float* __restrict grad, std::size_t count, const AdamScalars& scalars) {
  const AdamScalars s = scalars;
  for (std::size_t i = 0; i < count; ++i) {
    const float g = grad[i] * s.grad_multiplier;
    const float p = master[i] * s.decay;
    const float m = exp_avg[i] + s.one_minus_beta1 * (g - exp_avg[i]);
    const float v = exp_avg_sq[i] * s.beta2 + (s.one_minus_beta2 * g) * g;
    const float denominator = __builtin_sqrtf(v) / s.sqrt_correction2 + s.eps;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    master[i] = p - (s.step_size * m) / denominator;
  }
}

ELASTIC_CLONES
void adam_l2(float* __restrict master, float* __restrict exp_avg, float* __restrict exp_avg_sq,
             const float* __restrict grad, std::size_t count, const AdamScalars& scalars) {
  const AdamScalars s = scalars;
  for (std::size_t i = 0; i < count; ++i) {
    const float g = grad[i] * s.grad_multiplier + s.decay * master[i];
    const float m = exp_avg[i] + s.one_minus_beta1 * (g - exp_avg[i]);
    const float v = exp_avg_sq[i] * s.beta2 + (s.one_minus_beta2 * g) * g;
    const float denominator = __builtin_sqrtf(v) / s.sqrt_correction2 + s.eps;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    master[i] = master[i] - (s.step_size * m) / denominator;
  }
}

ELASTIC_CLONES
void lion(float* __restrict master, float* __restrict exp_avg, const float* __restrict grad, std::size_t count,
          const LionScalars& scalars) {
  const LionScalars s = scalars;
  for (std::size_t i = 0; i < count; ++i) {
    const float toward = grad[i] * s.grad_multiplier - exp_avg[i];
    const float c = exp_avg[i] + s.one_minus_beta1 * toward;
    const float direction = c > 0.0f ? 1.0f : (c < 0.0f ? -1.0f : c);  // c: zero or not a number
    exp_avg[i] = exp_avg[i] + s.one_minus_beta2 * toward;
    master[i] = master[i] * s.decay - s.lr * direction;
  }
}

ELASTIC_CLONES
void sgd(float* __restrict master, float* __restrict buffer, const float* __restrict grad, std::size_t count,
         const SgdScalars& scalars) {
  const SgdScalars s = scalars;
  for (std::size_t i = 0; i < count; ++i) {
    const float g = grad[i] * s.grad_multiplier + s.weight_decay * master[i];
    const float b = buffer[i] * s.momentum + g;
    buffer[i] = b;
    master[i] = master[i] - s.lr * b;
  }
}

ELASTIC_CLONES
void to_bf16(const float* __restrict source, std::uint16_t* __restrict target, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) target[i] = bf16_bits(source[i]);
}

ELASTIC_CLONES
void add_rows(const float* values, std::size_t rows, double* lanes) {
  add_squares(values, rows, lanes);
}

}  // namespace

void adam_update(float* master, float* exp_avg, float* exp_avg_sq, const float* grad, std::size_t count,
                 const AdamScalars& s) {
  const DefaultFloatMode mode;
  (s.decoupled ? adam_decoupled : adam_l2)(master, exp_avg, exp_avg_sq, grad, count, s);
}

void lion_update(float* master, float* exp_avg, const float* grad, std::size_t count, const LionScalars& s) {
  const DefaultFloatMode mode;
  lion(master, exp_avg, grad, count, s);
}

void sgd_update(float* master, float* buffer, const float* grad, std::size_t count, const SgdScalars& s) {
  const DefaultFloatMode mode;
  sgd(master, buffer, grad, count, s);
}

void round_to_bf16(const float* source, std::uint16_t* target, std::size_t count) {
  to_bf16(source, target, count);
}

double sum_of_squares(const float* values, std::size_t count) {
  const DefaultFloatMode mode;
  double lanes[kLanes] = {};
  add_rows(values, count / kLanes, lanes);
  add_last_squares(values, count, lanes);
  return sum_of_lanes(lanes);
}

}  // namespace elastic::state
