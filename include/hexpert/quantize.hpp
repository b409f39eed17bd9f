// Quantizers: BF16 -> NVFP4 with exact math, and what the quantization costs.
#pragma once

#include <cstdint>
#include <optional>

#include "hexpert/format.hpp"
#include "hexpert/status.hpp"
#include "hexpert/tensor.hpp"

namespace hexpert {

/// The optional "four over six" block quantizer: each block maps its maximum to code value 6, as
/// usual, or to 4, whichever errs less. docs/format.md section 3.
struct FourOverSix {
  enum class Error : uint8_t { kMae, kMse };
  Error error = Error::kMae;
  float e4m3_max = 448.0F;  // 448 or 256
};

struct QuantizeOptions {
  std::optional<FourOverSix> four_over_six{};  // unset: the definition
  int num_threads = 0;                         // 0: the OpenMP default; at most 1024
  Stream stream{};                             // of the device of the tensors
};

/// Quantizes activations online, one FP32 scale per token. On a CUDA device it enqueues on
/// options.stream and returns.
///
///   value(r, c) ~= e2m1(codes[r, c]) * e4m3(block_scales[r, c / 16]) * outer[r]
///
/// @param hidden_states       [tokens, hidden_size] bf16; rows may be strided, columns not.
/// @param padded_hidden_size  >= hidden_size, a multiple of 16. Columns past hidden_size are zero:
///                            code 0 and block scale 0x00 (0x7F in a row that holds a NaN).
/// @param out                 rows = tokens, cols = padded_hidden_size, per_row = true; on the device of
///                            hidden_states, where CUDA takes linear scales only. Its three parts
///                            lie apart from each other and from hidden_states, gaps between rows
///                            included.
/// @return kOk; kInvalidShape, kInvalidDtype, kNotContiguous, kInvalidArgument, kNullPointer,
///         kMisaligned, kDeviceMismatch, kInvalidOutput (overlap); kUnsupported (four_over_six,
///         tiled scales on CUDA), kUnsupportedDevice, kDeviceError.
/// @post   The same bytes on every backend and for every number of threads. A NaN poisons its own
///         row only: outer NaN, block scales 0x7F, codes 0. tokens == 0 succeeds.
/// Source: docs/format.md sections 2 and 3.
Status quantize_tokens(const ConstTensorView& hidden_states,
                       int64_t padded_hidden_size,
                       const Nvfp4View& out,
                       const QuantizeOptions& options = {});

/// Quantizes one weight matrix with a single FP32 scale.
///
/// @param matrix  [rows, cols] bf16 in host memory, cols % 16 == 0; rows may be strided, columns not.
/// @param out     Same rows and cols, per_row = false, any scale layout; parts apart as for
///                quantize_tokens. Padding bytes of a tiled scale layout are written as 0x00.
/// @return As quantize_tokens.
/// @post   A NaN poisons the whole matrix: outer NaN, block scales 0x7F, codes 0.
Status quantize_matrix(const ConstTensorView& matrix,
                       const Nvfp4View& out,
                       const QuantizeOptions& options = {});

/// Expands NVFP4 to f32 or bf16 (rounded to nearest even). All in host memory.
///
/// @param in   Any scale layout, per row or per matrix.
/// @param out  [rows, cols] f32 or bf16, packed, overlapping no part of `in`.
/// @return kOk; kInvalidShape, kShapeMismatch, kInvalidDtype, kNotContiguous, kDeviceMismatch,
///         kNullPointer, kMisaligned, kInvalidOutput (overlap).
Status dequantize(const ConstNvfp4View& in, const TensorView& out);

/// How far NVFP4 values are from the values they replace. Sums are kept in f64, so statistics of
/// parts can be merged.
struct ErrorStats {
  int64_t elements = 0;
  double signal = 0;             // sum of x^2
  double noise = 0;              // sum of (q - x)^2
  double max_error = 0;          // largest |q - x|
  double dot = 0;                // sum of q * x
  double quantized = 0;          // sum of q^2
  int64_t nonzero = 0;           // elements with x != 0
  int64_t rounded_to_zero = 0;   // of these, elements with q == 0
  int64_t blocks = 0;            // blocks of 16
  int64_t zero_scales = 0;       // blocks whose scale byte is 0x00 although an element is not zero
  int64_t saturated_scales = 0;  // blocks whose scale byte is 0x7E
  int64_t nonfinite = 0;         // NaN or infinity in x; not part of the sums

  double snr_db() const;       // 10 log10(signal / noise); +inf when exact
  double relative_l2() const;  // sqrt(noise / signal); 0 when both are 0
  double cosine() const;       // dot / sqrt(signal * quantized)
  void merge(const ErrorStats& other);
};

/// Error of `quantized` against the bf16 matrix it was made from.
///
/// @param original   [rows, cols_in] bf16 with cols_in <= quantized.cols; padding is not counted.
/// @return statistics; kShapeMismatch, kInvalidDtype, kNotContiguous, kNullPointer.
Result<ErrorStats> error_stats(const ConstTensorView& original, const ConstNvfp4View& quantized);

}  // namespace hexpert
