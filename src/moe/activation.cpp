#include "moe/activation.hpp"

#include <fmt/format.h>

#include <cmath>

namespace hexpert {
namespace {

bool is_finite_positive(float v) {
  return std::isfinite(v) && v > 0;
}

Status refuse(std::string_view name, std::string_view expected, float got) {
  return {ErrorCode::kInvalidArgument, fmt::format("{}: expected {}, got {}", name, expected, got)};
}

Status validate_parameters(const Activation& a) {
  if (a.type == ActivationType::kSwiGluOai) {
    if (!std::isfinite(a.alpha)) return refuse("alpha", "a finite number", a.alpha);
    if (!std::isfinite(a.beta)) return refuse("beta", "a finite number", a.beta);
    if (!(a.limit > 0)) return refuse("limit", "a number > 0", a.limit);
  } else if (a.alpha != 1 || a.beta != 0 || a.limit != FLT_MAX) {
    return {ErrorCode::kInvalidArgument,
            fmt::format("activation: alpha, beta and limit belong to {}, got {} with {}, {}, {}",
                        to_string(ActivationType::kSwiGluOai),
                        to_string(a.type),
                        a.alpha,
                        a.beta,
                        a.limit)};
  }
  if (a.type == ActivationType::kSiTu) {
    if (!is_finite_positive(a.situ_b)) {
      return refuse("situ_b", "a finite number > 0", a.situ_b);
    }
    if (a.situ_c && !is_finite_positive(*a.situ_c)) {
      return refuse("situ_c", "a finite number > 0, or none", *a.situ_c);
    }
  } else if (a.situ_b != 0 || a.situ_c) {
    return {ErrorCode::kInvalidArgument,
            fmt::format("activation: situ_b and situ_c belong to {}, got {}",
                        to_string(ActivationType::kSiTu),
                        to_string(a.type))};
  }
  return Status::success();
}

}  // namespace

std::string_view to_string(ActivationType type) {
  switch (type) {
    case ActivationType::kSquaredRelu:
      return "squared_relu";
    case ActivationType::kSwiGlu:
      return "swiglu";
    case ActivationType::kSwiGluOai:
      return "swiglu_oai";
    case ActivationType::kGeGluTanh:
      return "geglu_tanh";
    case ActivationType::kSiTu:
      return "situ";
  }
  return "unknown activation";
}

bool is_gated(ActivationType type) {
  return type != ActivationType::kSquaredRelu;
}

Status validate_activation(const Activation& activation, bool weights_are_gated) {
  if (activation.type > ActivationType::kSiTu) {
    return {ErrorCode::kUnsupported,
            fmt::format("activation: expected 0..{}, got {}",
                        static_cast<int>(ActivationType::kSiTu),
                        static_cast<int>(activation.type))};
  }
  if (is_gated(activation.type) != weights_are_gated) {
    return {ErrorCode::kActivationMismatch,
            fmt::format("activation: expected {} activation for {} weights, got {}",
                        weights_are_gated ? "a gated" : "a non-gated",
                        weights_are_gated ? "gated" : "non-gated",
                        to_string(activation.type))};
  }
  return validate_parameters(activation);
}

}  // namespace hexpert
