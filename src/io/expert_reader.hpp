// One expert at a time out of mapped memory, as BF16 or as NVFP4. Buffers are reused.
#pragma once

#include <cstdint>
#include <vector>

#include "hexpert/weights.hpp"
#include "io/checkpoint_impl.hpp"

namespace hexpert::io {

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
                         std::vector<uint8_t>* codes,
                         std::vector<uint8_t>* scales,
                         QuantizedProjection* out);

  const LayerSource& layer_;
  int num_threads_;
  std::vector<uint16_t> fc1_;
  std::vector<uint16_t> fc2_;
  std::vector<uint8_t> codes_[3];  // gate and up together when quantized; gate, up, down
  std::vector<uint8_t> scales_[3];
  float alpha_[2] = {1, 1};  // of FC1 and FC2 when quantized
};

}  // namespace hexpert::io
