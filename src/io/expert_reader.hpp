// One expert at a time out of mapped memory, as BF16 or as NVFP4. Buffers are reused.
#pragma once

#include <cstdint>
#include <new>
#include <vector>

#include "hexpert/weights.hpp"
#include "io/checkpoint_impl.hpp"

namespace hexpert::io {

// On 64-byte boundaries, as the quantizers want their output.
template <typename T>
struct BufferAllocator {
  using value_type = T;
  static constexpr std::align_val_t kAlignment{64};
  BufferAllocator() = default;
  template <typename U>
  BufferAllocator(const BufferAllocator<U>&) {}  // NOLINT(google-explicit-constructor)
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kAlignment)); }
  void deallocate(T* data, std::size_t) { ::operator delete(data, kAlignment); }
  bool operator==(const BufferAllocator&) const = default;
};
template <typename T>
using Buffer = std::vector<T, BufferAllocator<T>>;

// BF16 matrices whose columns may be padded with zeros.
struct DenseView {
  ConstTensorView fc1;  // [I or 2 I, stored columns] bf16: gate rows first
  ConstTensorView fc2;  // [H, stored columns] bf16
};

class ExpertReader {
 public:
  // `layer` must outlive the reader.
  ExpertReader(const LayerSource& layer, int num_threads);

  // BF16, each row padded with zeros to a multiple of `column_multiple`. kNonFiniteWeights,
  // kUnsupported for a layer that is NVFP4.
  Status read_dense(int64_t expert, int64_t column_multiple, DenseView* out);
  // NVFP4: what the files hold, checked, or quantized here. Valid until the next call.
  Status read_quantized(int64_t expert, QuantizedExpert* out);
  // Gives the mapped pages of an expert back.
  void release(int64_t expert) const;
  // Error of the expert that read_quantized() quantized last.
  Result<ErrorStats> error() const;

 private:
  Status quantize(int64_t expert, QuantizedExpert* out);
  Status take_quantized(int64_t expert, QuantizedExpert* out);
  Status take_projection(int64_t expert,
                         const char* name,
                         const ProjectionSource& source,
                         Buffer<uint8_t>* codes,
                         Buffer<uint8_t>* scales,
                         QuantizedProjection* out);

  const LayerSource& layer_;
  int num_threads_;
  Buffer<uint16_t> fc1_;
  Buffer<uint16_t> fc2_;
  Buffer<uint8_t> codes_[3];  // gate and up together when quantized; gate, up, down
  Buffer<uint8_t> scales_[3];
  float alpha_[2] = {1, 1};  // of FC1 and FC2 when quantized
};

}  // namespace hexpert::io
