// Activations: the definition, in FP64, for host and device, and the rules for their parameters. docs/format.md section 6.
#pragma once

#include <cmath>

#include "format/codec.hpp"
#include "hexpert/moe.hpp"
#include "hexpert/status.hpp"

namespace hexpert {

// The activation of one feature from its scaled FP32 pre-activations. Squared ReLU uses `up` alone.
// NaN propagates; a zero gate (or a zero `up` of squared ReLU) gives zero for finite inputs.
HX_HOST_DEVICE inline double activate(const Activation& activation, float up, float gate);

// kUnsupported for a type that does not exist, kInvalidArgument for bad parameters,
// kActivationMismatch when the weights are gated and the activation is not, or the reverse.
Status validate_activation(const Activation& activation, bool weights_are_gated);

// --- inline ---

namespace activation_detail {

// value * sigmoid(v). Where exp(-v) overflows the product is zero, also for an infinite value.
HX_HOST_DEVICE inline double times_sigmoid(double value, double v) {
  const double sigmoid = 1.0 / (1.0 + std::exp(-v));
  return sigmoid == 0 ? std::copysign(0.0, value) : value * sigmoid;
}

// 0.5 g (1 + tanh(x)) is g sigmoid(2 x), which does not cancel for negative x.
HX_HOST_DEVICE inline double gelu_tanh(double g) {
  return times_sigmoid(g, 2.0 * 0.7978845608 * (g + 0.044715 * g * g * g));
}

HX_HOST_DEVICE inline double clamp_above(double v, double limit) {
  return v > limit ? limit : v;
}
HX_HOST_DEVICE inline double clamp_below(double v, double limit) {
  return v < limit ? limit : v;
}

}  // namespace activation_detail

HX_HOST_DEVICE inline double activate(const Activation& activation, float up, float gate) {
  namespace detail = activation_detail;
  const double u = up;
  const double g = gate;
  switch (activation.type) {
    case ActivationType::kSquaredRelu: {
      const double r = u < 0 ? 0.0 : u;
      return r * r;
    }
    case ActivationType::kSwiGlu:
      return detail::times_sigmoid(g, g) * u;
    case ActivationType::kSwiGluOai: {
      const double limit = activation.limit;
      const double clamped_gate = detail::clamp_above(g, limit);
      const double clamped_up = detail::clamp_below(detail::clamp_above(u, limit), -limit);
      return detail::times_sigmoid(clamped_gate, activation.alpha * clamped_gate) *
             (clamped_up + activation.beta);
    }
    case ActivationType::kGeGluTanh:
      return detail::gelu_tanh(g) * u;
    case ActivationType::kSiTu: {
      const double b = activation.situ_b;
      const double soft_gate = detail::times_sigmoid(b * std::tanh(g / b), g);
      if (!activation.situ_c) return soft_gate * u;
      const double c = *activation.situ_c;
      return soft_gate * (c * std::tanh(u / c));
    }
  }
  return NAN;
}

}  // namespace hexpert
