// Status and Result<T>: how every hexpert call reports failure.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace hexpert {

/// Why a call failed. The numeric values are part of the C ABI: append, never reorder.
enum class ErrorCode : int {
  kOk = 0,
  kInvalidShape = 1,        // wrong rank, or a dimension of 0
  kInvalidDtype = 2,        // element type not accepted
  kNotContiguous = 3,       // last dimension strided, or rows not packed
  kShapeMismatch = 4,       // two arguments disagree
  kMetadataMismatch = 5,    // `out` was prepared for another problem
  kDeviceMismatch = 6,      // arguments on different devices
  kNonFiniteWeights = 7,    // NaN or infinity in an expert
  kInvalidArgument = 8,     // a scalar argument out of range
  kActivationMismatch = 9,  // gated weights with a non-gated activation, or the reverse
  kUnsupported = 10,        // valid, but not implemented by this backend
  kInvalidOutput = 11,      // `out`: shape, dtype, layout; any memory that is written: overlap
  kNullPointer = 12,        // null data with a non-zero size
  kMisaligned = 13,         // base address alignment
  kTooLarge = 14,           // an index would not fit in int32
  kWorkspaceTooSmall = 15,  // needed and given bytes are in the message
  kUnsupportedDevice = 16,  // no backend for this device
  kDeviceError = 17,        // the device reported an error after a launch
  kOutOfMemory = 18,        // allocation failed
  kIoError = 19,            // the operating system refused a file operation
  kInvalidFile = 20,        // a file is malformed, truncated or inconsistent
  kNotFound = 21,           // a tensor, expert, shard or backend name does not exist
};

/// Spelling of a code for people and logs: "shape mismatch".
std::string_view to_string(ErrorCode code);

/// Outcome of a call: a code, and for failures a message that names the argument, the requirement
/// and what was given.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status success() { return {}; }

  bool ok() const { return code_ == ErrorCode::kOk; }
  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }
  /// "shape mismatch: fc2_weight: expected ..., got ...", or "ok".
  std::string to_string() const;

 private:
  ErrorCode code_ = ErrorCode::kOk;
  std::string message_;
};

/// Thrown by Result<T>::value() only; hexpert itself never throws it.
class Error : public std::runtime_error {
 public:
  explicit Error(const Status& status) : std::runtime_error(status.to_string()), status_(status) {}
  const Status& status() const { return status_; }

 private:
  Status status_;
};

/// A value, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}           // NOLINT(google-explicit-constructor)
  Result(Status failure) : state_(std::move(failure)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return std::holds_alternative<T>(state_); }
  Status status() const { return ok() ? Status() : std::get<Status>(state_); }

  /// The value. Throws Error when there is none.
  T& value() & { return checked(), std::get<T>(state_); }
  const T& value() const& { return checked(), std::get<T>(state_); }
  T&& value() && { return checked(), std::get<T>(std::move(state_)); }

  /// The value, unchecked: only after ok().
  T& operator*() & { return *std::get_if<T>(&state_); }
  const T& operator*() const& { return *std::get_if<T>(&state_); }
  T&& operator*() && { return std::move(*std::get_if<T>(&state_)); }
  T* operator->() { return std::get_if<T>(&state_); }
  const T* operator->() const { return std::get_if<T>(&state_); }

 private:
  void checked() const {
    if (!ok()) throw Error(std::get<Status>(state_));
  }
  std::variant<T, Status> state_;
};

}  // namespace hexpert

/// Returns the Status of `expression` from the enclosing function unless it is ok.
#define HX_RETURN_IF_ERROR(expression)                                                       \
  do {                                                                                       \
    if (::hexpert::Status hx_returned = (expression); !hx_returned.ok()) return hx_returned; \
  } while (false)
