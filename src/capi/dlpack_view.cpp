#include "capi/dlpack_view.hpp"

#include <fmt/format.h>

#include <optional>

namespace hexpert {
namespace {

// Keeps element and byte counts inside int64.
constexpr int64_t kMaxElements = int64_t{1} << 58;

std::optional<DType> dtype_of(const DLDataType& type) {
  if (type.lanes != 1) return std::nullopt;
  switch (type.code) {
    case kDLUInt:
      if (type.bits == 8) return DType::kU8;
      break;
    case kDLInt:
      if (type.bits == 32) return DType::kI32;
      if (type.bits == 64) return DType::kI64;
      break;
    case kDLFloat:
      if (type.bits == 16) return DType::kF16;
      if (type.bits == 32) return DType::kF32;
      break;
    case kDLBfloat:
      if (type.bits == 16) return DType::kBF16;
      break;
    case kDLFloat8_e4m3fn:
      if (type.bits == 8) return DType::kE4M3;
      break;
    default:
      break;
  }
  return std::nullopt;
}

std::string describe(const DLDataType& type) {
  if (const std::optional<DType> dtype = dtype_of(type)) return std::string(to_string(*dtype));
  const std::string lanes = type.lanes == 1 ? "" : fmt::format("x{}", type.lanes);
  switch (type.code) {
    case kDLInt:
      return fmt::format("i{}{}", type.bits, lanes);
    case kDLUInt:
      return fmt::format("u{}{}", type.bits, lanes);
    case kDLFloat:
      return fmt::format("f{}{}", type.bits, lanes);
    case kDLBfloat:
      return fmt::format("bf{}{}", type.bits, lanes);
    case kDLComplex:
      return fmt::format("complex{}{}", type.bits, lanes);
    case kDLBool:
      return fmt::format("bool{}", lanes);
    default:
      return fmt::format("DLPack type code {} of {} bits{}", type.code, type.bits, lanes);
  }
}

}  // namespace

std::string describe(const DLDevice& device) {
  switch (device.device_type) {
    case kDLCPU:
    case kDLCUDAHost:
      return "cpu";
    case kDLCUDA:
    case kDLCUDAManaged:
      return fmt::format("cuda:{}", device.device_id);
    default:
      return fmt::format("device type {}", static_cast<int>(device.device_type));
  }
}

std::string describe(const DLTensor& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.ndim; ++i)
    text += fmt::format("{}{}", i == 0 ? "" : ", ", tensor.shape[i]);
  return text + "] " + describe(tensor.dtype);
}

Result<Device> device_of(const char* name, const DLDevice& device) {
  switch (device.device_type) {
    case kDLCPU:
    case kDLCUDAHost:
      return Device::cpu();
    case kDLCUDA:
    case kDLCUDAManaged:
      return Device::cuda(device.device_id);
    default:
      return Status(ErrorCode::kDeviceMismatch,
                    fmt::format("{}: expected cpu or cuda, got {}", name, describe(device)));
  }
}

Result<TensorView> view_of(const char* name, const char* wanted, const DLTensor* tensor) {
  if (tensor == nullptr) {
    return Status(ErrorCode::kNullPointer, fmt::format("{}: expected a tensor, got null", name));
  }
  if (tensor->ndim < 0 || tensor->ndim > kMaxRank) {
    return Status(ErrorCode::kInvalidShape,
                  fmt::format("{}: expected rank 0..{}, got {}", name, kMaxRank, tensor->ndim));
  }
  if (tensor->ndim > 0 && tensor->shape == nullptr) {
    return Status(ErrorCode::kNullPointer,
                  fmt::format("{}: expected a shape of rank {}, got null", name, tensor->ndim));
  }
  const std::optional<DType> dtype = dtype_of(tensor->dtype);
  if (!dtype) {
    return Status(ErrorCode::kInvalidDtype,
                  fmt::format("{}: expected {}, got {}", name, wanted, describe(*tensor)));
  }
  const Result<Device> device = device_of(name, tensor->device);
  if (!device.ok()) return device.status();

  TensorView view;
  view.data = tensor->data == nullptr ? nullptr
                                      : static_cast<std::byte*>(tensor->data) + tensor->byte_offset;
  view.dtype = *dtype;
  view.rank = tensor->ndim;
  view.device = *device;
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    const int64_t extent = tensor->shape[i];
    view.shape[i] = extent;
    view.strides[i] = tensor->strides == nullptr ? stride : tensor->strides[i];
    if (extent < 0 || __builtin_mul_overflow(stride, extent > 0 ? extent : 1, &stride) ||
        stride > kMaxElements) {
      return Status(
          ErrorCode::kInvalidShape,
          fmt::format("{}: expected at most 2^58 elements, got {}", name, describe(*tensor)));
    }
  }
  pack_if_empty(view);
  return view;
}

void pack_if_empty(TensorView& view) {
  if (view.num_elements() != 0) return;
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.strides[i] = stride;
    stride *= view.shape[i];
  }
}

}  // namespace hexpert
