#include "hexpert/tensor.hpp"

namespace hexpert {

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kU8:
    case DType::kE4M3:
      return 1;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kI64:
      return 8;
  }
  return 0;
}

std::string_view to_string(DType dtype) {
  switch (dtype) {
    case DType::kU8:
      return "u8";
    case DType::kE4M3:
      return "e4m3";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "f16";
    case DType::kF32:
      return "f32";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
  }
  return "unknown";
}

std::string to_string(const Device& device) {
  if (device.type == DeviceType::kCpu) return "cpu";
  return "cuda:" + std::to_string(device.index);
}

std::string describe(const ConstTensorView& view) {
  std::string text = "[";
  for (int i = 0; i < view.rank; ++i) {
    if (i > 0) text += ", ";
    if (i == kMaxRank) {
      text += "...";  // a rank that no view can have
      break;
    }
    text += std::to_string(view.shape[i]);
  }
  return text + "] " + std::string(to_string(view.dtype));
}

}  // namespace hexpert
