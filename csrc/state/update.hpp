// Optimizer updates as fixed sequences of correctly rounded IEEE-754 operations.
//
// Owner and mirrors of a state block replay the same step independently and must
// end with the same bits (docs/design.md §6). Every element goes through the
// same named operations, each rounded once to fp32: no fused multiply-add (the
// build passes -ffp-contract=off), no reassociation, no flush of denormals, round
// to nearest even. The result of an element depends on its inputs alone: not on
// where a range is cut, how it is aligned, or which vector width the machine has.
//
// Formula: AdamW (Loshchilov and Hutter, arXiv 1711.05101) and Adam (Kingma and
// Ba, arXiv 1412.6980), operations in the order of torch.optim's single-tensor
// code; SGD with momentum likewise; Lion (Chen et al., arXiv 2302.06675, algorithm 2).
#pragma once

#include <cstddef>
#include <cstdint>

namespace elastic::state {

struct AdamScalars {
  float grad_multiplier;    // applied to the gradient first
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float eps;
  float decay;              // decoupled: 1 - lr * weight_decay; otherwise weight_decay (L2)
  float step_size;          // lr / bias_correction1
  float sqrt_correction2;   // sqrt(bias_correction2)
  bool decoupled;
};

// `count` elements of each row of a block: master, first and second moment.
struct Rows {
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
};

struct LionScalars {
  float grad_multiplier;
  float lr;
  float one_minus_beta1;    // of the update
  float one_minus_beta2;    // of the momentum
  float decay;              // 1 - lr * weight_decay
};

struct SgdScalars {
  float grad_multiplier;
  float lr;
  float momentum;
  float weight_decay;
};

void adam_update(const Rows& rows, const float* grad, std::size_t count, const AdamScalars& s);

// Two steps, the second by `next`, with the bits of one after the other. The rows are read and written once: they come
// from memory, as a rule, which takes most of an update's time. Both steps are decoupled or neither is.
void adam_update_twice(const Rows& rows, const float* grad, const float* next, std::size_t count, const AdamScalars& s,
                       const AdamScalars& of_next);

// `exp_avg` is the momentum. An update of zero leaves its parameter, one that is not a number makes it none.
void lion_update(float* master, float* exp_avg, const float* grad, std::size_t count, const LionScalars& s);

// `buffer` is the momentum; zero before the first step.
void sgd_update(float* master, float* buffer, const float* grad, std::size_t count, const SgdScalars& s);

// Round to nearest even, NaN to the quiet NaN torch uses.
void round_to_bf16(const float* source, std::uint16_t* target, std::size_t count);

// Sum of squares in fp64 in the order of squares.hpp. Squares of finite fp32 values cannot overflow fp64, so the result
// is finite exactly when all elements are.
double sum_of_squares(const float* values, std::size_t count);

}  // namespace elastic::state
