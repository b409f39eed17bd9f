// The layer before quantization, in FP32: what NVFP4 is compared with.
#pragma once

#include <string_view>
#include <vector>

#include "hexpert/checkpoint.hpp"
#include "hexpert/moe.hpp"

namespace hexpert::tools {

// out [tokens, H]: routed experts with their own weights and unquantized activations; sums and
// activations in FP32, no rounding in between. One expert in memory at a time. Errors as for
// load_dense_expert().
Result<std::vector<float>> dense_forward(const Checkpoint& checkpoint,
                                         const MoeLayerInfo& layer,
                                         const Activation& activation,
                                         const MoeInputs& inputs);

// Error of an output [tokens, H] bf16 against the values it should have.
ErrorStats output_error(const std::vector<float>& expected, const uint16_t* output);

}  // namespace hexpert::tools
