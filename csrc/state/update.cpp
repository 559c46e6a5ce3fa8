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

// One element of a block's three rows.
struct Element {
  float master, exp_avg, exp_avg_sq;
};

template <bool decoupled>
ELASTIC_INLINE Element after(const Element& at, float grad, const AdamScalars& s) {
  const float g = decoupled ? grad * s.grad_multiplier : grad * s.grad_multiplier + s.decay * at.master;
  const float p = decoupled ? at.master * s.decay : at.master;
  const float m = at.exp_avg + s.one_minus_beta1 * (g - at.exp_avg);
  const float v = at.exp_avg_sq * s.beta2 + (s.one_minus_beta2 * g) * g;
  const float denominator = __builtin_sqrtf(v) / s.sqrt_correction2 + s.eps;
  return {p - (s.step_size * m) / denominator, m, v};
}

// One step of each element, or two (`next` is not used for one): the second one finds its element in registers.
template <bool decoupled, int steps>
ELASTIC_INLINE void adam(const Rows& rows, const float* __restrict grad, const float* __restrict next,
                         std::size_t count, const AdamScalars& scalars, const AdamScalars& scalars_of_next) {
  float* __restrict master = rows.master;
  float* __restrict exp_avg = rows.exp_avg;
  float* __restrict exp_avg_sq = rows.exp_avg_sq;
  const AdamScalars s = scalars, t = scalars_of_next;
  for (std::size_t i = 0; i < count; ++i) {
    Element x = after<decoupled>({master[i], exp_avg[i], exp_avg_sq[i]}, grad[i], s);
    if (steps == 2) x = after<decoupled>(x, next[i], t);
    master[i] = x.master;
    exp_avg[i] = x.exp_avg;
    exp_avg_sq[i] = x.exp_avg_sq;
  }
}

ELASTIC_CLONES
void adam_once(const Rows& rows, const float* grad, std::size_t count, const AdamScalars& s) {
  if (s.decoupled) return adam<true, 1>(rows, grad, grad, count, s, s);
  adam<false, 1>(rows, grad, grad, count, s, s);
}

ELASTIC_CLONES
void adam_twice(const Rows& rows, const float* grad, const float* next, std::size_t count, const AdamScalars& s,
                const AdamScalars& t) {
  if (s.decoupled) return adam<true, 2>(rows, grad, next, count, s, t);
  adam<false, 2>(rows, grad, next, count, s, t);
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

void adam_update(const Rows& rows, const float* grad, std::size_t count, const AdamScalars& s) {
  const DefaultFloatMode mode;
  adam_once(rows, grad, count, s);
}

void adam_update_twice(const Rows& rows, const float* grad, const float* next, std::size_t count, const AdamScalars& s,
                       const AdamScalars& of_next) {
  const DefaultFloatMode mode;
  adam_twice(rows, grad, next, count, s, of_next);
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
