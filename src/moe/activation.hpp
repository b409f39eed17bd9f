// Activations: the definition, in FP64, and the rules for their parameters. docs/format.md section 6.
#pragma once

#include "hexpert/moe.hpp"
#include "hexpert/status.hpp"

namespace hexpert {

// The activation of one feature from its scaled FP32 pre-activations. Squared ReLU uses `up` alone.
// NaN propagates; a zero gate (or a zero `up` of squared ReLU) gives zero for finite inputs.
double activate(const Activation& activation, float up, float gate);

// kUnsupported for a type that does not exist, kInvalidArgument for bad parameters,
// kActivationMismatch when the weights are gated and the activation is not, or the reverse.
Status validate_activation(const Activation& activation, bool weights_are_gated);

}  // namespace hexpert
