#include "hexpert/status.hpp"

namespace hexpert {

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::kOk:
      return "ok";
    case ErrorCode::kInvalidShape:
      return "invalid shape";
    case ErrorCode::kInvalidDtype:
      return "invalid dtype";
    case ErrorCode::kNotContiguous:
      return "not contiguous";
    case ErrorCode::kShapeMismatch:
      return "shape mismatch";
    case ErrorCode::kMetadataMismatch:
      return "metadata mismatch";
    case ErrorCode::kDeviceMismatch:
      return "device mismatch";
    case ErrorCode::kNonFiniteWeights:
      return "non-finite weights";
    case ErrorCode::kInvalidArgument:
      return "invalid argument";
    case ErrorCode::kActivationMismatch:
      return "activation mismatch";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kInvalidOutput:
      return "invalid output";
    case ErrorCode::kNullPointer:
      return "null pointer";
    case ErrorCode::kMisaligned:
      return "misaligned";
    case ErrorCode::kTooLarge:
      return "too large";
    case ErrorCode::kWorkspaceTooSmall:
      return "workspace too small";
    case ErrorCode::kUnsupportedDevice:
      return "unsupported device";
    case ErrorCode::kDeviceError:
      return "device error";
    case ErrorCode::kOutOfMemory:
      return "out of memory";
    case ErrorCode::kIoError:
      return "input/output error";
    case ErrorCode::kInvalidFile:
      return "invalid file";
    case ErrorCode::kNotFound:
      return "not found";
  }
  return "unknown error";
}

std::string Status::to_string() const {
  if (ok()) return "ok";
  return std::string(hexpert::to_string(code_)) + ": " + message_;
}

}  // namespace hexpert
