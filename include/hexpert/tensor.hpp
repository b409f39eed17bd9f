// TensorView: a typed, strided view of memory that somebody else owns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

namespace hexpert {

enum class DType : uint8_t { kU8, kE4M3, kBF16, kF16, kF32, kI32, kI64 };

/// Bytes of one element.
int64_t size_of(DType dtype);
/// "bf16", "f32", ...
std::string_view to_string(DType dtype);

enum class DeviceType : uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;

  static Device cpu() { return {}; }
  static Device cuda(int index) { return {DeviceType::kCuda, index}; }
  bool operator==(const Device&) const = default;
};

/// "cpu", "cuda:0".
std::string to_string(const Device& device);

/// Where asynchronous work is enqueued: a cudaStream_t for CUDA devices, ignored on the CPU.
struct Stream {
  void* handle = nullptr;
};

inline constexpr int kMaxRank = 6;

/// Pointer, element type, shape and strides (in elements) of memory owned by the caller.
/// `Pointer` is `void*` (TensorView) or `const void*` (ConstTensorView).
template <typename Pointer>
struct BasicTensorView {
  Pointer data = nullptr;
  DType dtype = DType::kU8;
  int rank = 0;
  int64_t shape[kMaxRank] = {};
  int64_t strides[kMaxRank] = {};
  Device device;

  BasicTensorView() = default;
  /// A packed row-major view. More than kMaxRank extents make a view that every call refuses.
  BasicTensorView(Pointer data_in,
                  DType dtype_in,
                  std::initializer_list<int64_t> shape_in,
                  Device device_in = {})
      : data(data_in), dtype(dtype_in), rank(static_cast<int>(shape_in.size())), device(device_in) {
    int i = 0;
    for (int64_t extent : shape_in) {
      if (i < kMaxRank) shape[i++] = extent;
    }
    int64_t stride = 1;
    for (--i; i >= 0; --i) {
      strides[i] = stride;
      stride *= shape[i];
    }
  }
  /// A ConstTensorView is made from a TensorView.
  template <typename Mutable>
  requires(std::is_same_v<Pointer, const void*>&& std::is_same_v<Mutable, void*>)
      BasicTensorView(const BasicTensorView<Mutable>& view)  // NOLINT(google-explicit-constructor)
      : data(view.data), dtype(view.dtype), rank(view.rank), device(view.device) {
    for (int i = 0; i < kMaxRank; ++i) {
      shape[i] = view.shape[i];
      strides[i] = view.strides[i];
    }
  }

  int64_t num_elements() const {
    int64_t count = 1;
    for (int i = 0; i < rank; ++i)
      count *= shape[i];
    return count;
  }
  /// Row-major without gaps.
  bool is_contiguous() const {
    int64_t stride = 1;
    for (int i = rank - 1; i >= 0; --i) {
      if (shape[i] != 1 && strides[i] != stride) return false;
      stride *= shape[i];
    }
    return true;
  }
  template <typename T>
  auto* as() const {
    if constexpr (std::is_same_v<Pointer, const void*>) {
      return static_cast<const T*>(data);
    } else {
      return static_cast<T*>(data);
    }
  }
};

using TensorView = BasicTensorView<void*>;
using ConstTensorView = BasicTensorView<const void*>;

/// "[8, 2688, 1856] bf16".
std::string describe(const ConstTensorView& view);

}  // namespace hexpert
