// Experts of a checkpoint as ExpertWeights, as BF16, and what quantizing them costs.
#include <cstring>
#include <utility>

#include "core/threads.hpp"
#include "hexpert/checkpoint.hpp"
#include "io/checkpoint_impl.hpp"
#include "io/expert_reader.hpp"
#include "io/io_support.hpp"

namespace hexpert {
namespace {

Result<const io::LayerSource*> find_expert(const Checkpoint& checkpoint,
                                           std::string_view prefix,
                                           int64_t expert) {
  const Result<const io::LayerSource*> layer = checkpoint.impl().layer(prefix);
  if (!layer.ok()) return layer.status();
  const int64_t experts = (*layer)->info.shape.num_local_experts;
  if (expert < 0 || expert >= experts) {
    return Status(ErrorCode::kInvalidArgument,
                  "expert: expected 0.." + std::to_string(experts - 1) + " in " +
                      io::in_quotes(prefix) + ", got " + std::to_string(expert));
  }
  return *layer;
}

}  // namespace

Result<ExpertWeights> load_experts(const Checkpoint& checkpoint,
                                   std::string_view prefix,
                                   const PrepareOptions& options,
                                   int64_t first_expert,
                                   int64_t num_experts) {
  return io::without_bad_alloc([&]() -> Result<ExpertWeights> {
    const Result<const io::LayerSource*> layer = find_expert(checkpoint, prefix, first_expert);
    if (!layer.ok()) return layer.status();
    ExpertShape shape = (*layer)->info.shape;
    const int64_t rest = shape.num_local_experts - first_expert;
    shape.num_local_experts = num_experts == -1 ? rest : num_experts;
    if (shape.num_local_experts < 1 || shape.num_local_experts > rest) {
      return Status(ErrorCode::kInvalidArgument,
                    "num_experts: expected 1.." + std::to_string(rest) + " from expert " +
                        std::to_string(first_expert) + " on, got " + std::to_string(num_experts));
    }
    Result<ExpertWeights> weights = ExpertWeights::allocate(shape, options);
    if (!weights.ok()) return weights;
    io::ExpertReader reader(**layer, options.num_threads);
    for (int64_t e = 0; e < shape.num_local_experts; ++e) {
      if (is_nvfp4((*layer)->info.format)) {
        QuantizedExpert expert;
        HX_RETURN_IF_ERROR(reader.read_quantized(first_expert + e, &expert));
        HX_RETURN_IF_ERROR(weights->set_quantized_expert(e, expert));
      } else {
        io::DenseView dense;
        HX_RETURN_IF_ERROR(reader.read_dense(first_expert + e, 1, &dense));
        HX_RETURN_IF_ERROR(weights->set_expert(e, dense.fc1, dense.fc2));
      }
    }
    return weights;
  });
}

Result<DenseExpert> load_dense_expert(const Checkpoint& checkpoint,
                                      std::string_view prefix,
                                      int64_t expert) {
  return io::without_bad_alloc([&]() -> Result<DenseExpert> {
    const Result<const io::LayerSource*> layer = find_expert(checkpoint, prefix, expert);
    if (!layer.ok()) return layer.status();
    io::ExpertReader reader(**layer, 0);
    io::DenseView dense;
    HX_RETURN_IF_ERROR(reader.read_dense(expert, 1, &dense));
    const auto copy = [](const ConstTensorView& from) -> Result<HostTensor> {
      Result<HostTensor> to = HostTensor::allocate(from.dtype, {from.shape[0], from.shape[1]});
      if (to.ok()) {
        std::memcpy(to->as<uint8_t>(), from.data, static_cast<std::size_t>(to->size_bytes()));
      }
      return to;
    };
    Result<HostTensor> fc1 = copy(dense.fc1);
    if (!fc1.ok()) return fc1.status();
    Result<HostTensor> fc2 = copy(dense.fc2);
    if (!fc2.ok()) return fc2.status();
    return DenseExpert{*std::move(fc1), *std::move(fc2)};
  });
}

Result<ErrorStats> expert_error(const Checkpoint& checkpoint,
                                std::string_view prefix,
                                int64_t expert,
                                int num_threads) {
  return io::without_bad_alloc([&]() -> Result<ErrorStats> {
    HX_RETURN_IF_ERROR(check_num_threads("num_threads", num_threads));
    const Result<const io::LayerSource*> layer = find_expert(checkpoint, prefix, expert);
    if (!layer.ok()) return layer.status();
    if (is_nvfp4((*layer)->info.format)) {
      return Status(ErrorCode::kUnsupported,
                    io::place_of((*layer)->info.prefix) +
                        "the weights are NVFP4: nothing to compare them with");
    }
    io::ExpertReader reader(**layer, num_threads);
    QuantizedExpert ignored;
    HX_RETURN_IF_ERROR(reader.read_quantized(expert, &ignored));
    return reader.error();
  });
}

}  // namespace hexpert
