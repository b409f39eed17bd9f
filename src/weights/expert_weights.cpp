// Prepare, refresh, import and export of expert weights. docs/format.md section 5.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "backend/backend.hpp"
#include "core/threads.hpp"
#include "core/without_bad_alloc.hpp"
#include "fmt/format.h"
#include "weights/quantize_experts.hpp"
#include "weights/storage.hpp"
#include "weights/tile_groups.hpp"

namespace hexpert {
namespace {

using Projection = ExpertWeights::Projection;

constexpr int64_t kMaxSize = int64_t{1} << 30;  // of H and I: keeps every product inside int64

// Where the stacks of some weights may lie.
struct Place {
  Device device;
  Status (*check_memory)(std::string_view, const void*, const Device&) = nullptr;
};

Result<Place> place_of(const Device& device) {
  if (device == Device::cpu()) return Place{};
  Result<const Backend*> backend = find_backend("", device);
  if (!backend.ok()) return backend.status();
  return Place{device, (*backend)->check_memory};
}

Status check_stack(const char* name, const ConstTensorView& view, int rank, const Place& place) {
  if (view.rank != rank) {
    return {ErrorCode::kInvalidShape,
            fmt::format("{}: expected rank {}, got {}", name, rank, describe(view))};
  }
  for (int i = 0; i < rank; ++i) {
    if (view.shape[i] < 1 || view.shape[i] > kMaxSize) {
      return {ErrorCode::kInvalidShape,
              fmt::format(
                  "{}: every dimension must be in 1..{}, got {}", name, kMaxSize, describe(view))};
    }
  }
  if (view.dtype != DType::kBF16) {
    return {ErrorCode::kInvalidDtype,
            fmt::format("{}: expected bf16, got {}", name, describe(view))};
  }
  if (!view.is_contiguous()) {
    return {ErrorCode::kNotContiguous, fmt::format("{}: expected a packed row-major tensor", name)};
  }
  if (view.device != Device::cpu() && view.device != place.device) {
    return {ErrorCode::kDeviceMismatch,
            fmt::format("{}: expected memory of {}, got {}",
                        name,
                        to_string(place.device),
                        to_string(view.device))};
  }
  if (view.data == nullptr) {
    return {ErrorCode::kNullPointer, fmt::format("{}: data is null", name)};
  }
  if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0) {
    return {ErrorCode::kMisaligned,
            fmt::format("{}: address {} is not a multiple of 16 bytes", name, view.data)};
  }
  if (view.device == Device::cpu() || place.check_memory == nullptr) return {};
  return place.check_memory(name, view.data, place.device);
}

// Reads the sizes off two stacks (rank 3) or one expert's matrices (rank 2).
Result<ExpertShape> shape_of(const ConstTensorView& fc1,
                             const ConstTensorView& fc2,
                             int rank,
                             const Device& device) {
  const Result<Place> place = place_of(device);
  if (!place.ok()) return place.status();
  HX_RETURN_IF_ERROR(check_stack("fc1_weight", fc1, rank, *place));
  HX_RETURN_IF_ERROR(check_stack("fc2_weight", fc2, rank, *place));
  const int64_t* d1 = fc1.shape + (rank - 2);
  const int64_t* d2 = fc2.shape + (rank - 2);
  ExpertShape shape;
  shape.num_local_experts = rank == 3 ? fc2.shape[0] : 1;
  shape.hidden_size = d2[0];
  shape.intermediate_size = d2[1];
  if (rank == 3 && fc1.shape[0] != fc2.shape[0]) {
    return Status(ErrorCode::kShapeMismatch,
                  fmt::format("fc2_weight: expected {} experts to match fc1_weight, got {}",
                              fc1.shape[0],
                              fc2.shape[0]));
  }
  if (d1[1] != shape.hidden_size) {
    return Status(
        ErrorCode::kShapeMismatch,
        fmt::format("fc1_weight: expected {} columns (hidden_size, the rows of fc2_weight), "
                    "got {}",
                    shape.hidden_size,
                    d1[1]));
  }
  if (d1[0] != shape.intermediate_size && d1[0] != 2 * shape.intermediate_size) {
    return Status(
        ErrorCode::kShapeMismatch,
        fmt::format("fc1_weight: expected {} rows (intermediate_size) or {} (gate and up), "
                    "got {}",
                    shape.intermediate_size,
                    2 * shape.intermediate_size,
                    d1[0]));
  }
  shape.gated = d1[0] == 2 * shape.intermediate_size;
  return shape;
}

Status compare_field(const char* field, int64_t prepared, int64_t given) {
  if (prepared == given) return {};
  return {ErrorCode::kMetadataMismatch,
          fmt::format("{}: the weights were prepared for {}, got {}", field, prepared, given)};
}

Status check_same(const ExpertShape& prepared, const ExpertShape& given) {
  HX_RETURN_IF_ERROR(
      compare_field("num_local_experts", prepared.num_local_experts, given.num_local_experts));
  HX_RETURN_IF_ERROR(compare_field("hidden_size", prepared.hidden_size, given.hidden_size));
  HX_RETURN_IF_ERROR(
      compare_field("intermediate_size", prepared.intermediate_size, given.intermediate_size));
  return compare_field("gated", prepared.gated ? 1 : 0, given.gated ? 1 : 0);
}

uint16_t amax_bits(const uint16_t* x, int64_t count, int threads) {
  constexpr int64_t kChunk = 1 << 16;
  const cpu::Kernels& kernels = cpu::best_kernels();
  uint16_t amax = 0;
#pragma omp parallel for num_threads(threads) reduction(max : amax) schedule(static)
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    amax = std::max(amax, kernels.amax_bits(x + begin, std::min(kChunk, count - begin)));
  }
  return amax;
}

// The first non-finite expert of a stack, by matrix.
Status check_finite(
    const char* name, const uint16_t* x, int64_t experts, int64_t elements, int threads) {
  for (int64_t e = 0; e < experts; ++e) {
    const uint16_t amax = amax_bits(x + e * elements, elements, threads);
    if (amax >= 0x7F80) {
      return {
          ErrorCode::kNonFiniteWeights,
          fmt::format("{}: expert {} holds {}", name, e, amax > 0x7F80 ? "a NaN" : "an infinity")};
    }
  }
  return {};
}

Status quantize_stacks(ExpertWeights::Storage& s,
                       const ConstTensorView& fc1,
                       const ConstTensorView& fc2,
                       bool refuse_nonfinite,
                       Stream stream) {
  if (s.on_device) return s.on_device->quantize(fc1, fc2, refuse_nonfinite, stream);
  const int64_t experts = s.shape.num_local_experts;
  if (refuse_nonfinite) {
    const int64_t fc1_elements = fc1.num_elements() / experts;
    const int64_t fc2_elements = fc2.num_elements() / experts;
    const int threads = threads_or_default(s.num_threads);
    HX_RETURN_IF_ERROR(
        check_finite("fc1_weight", fc1.as<uint16_t>(), experts, fc1_elements, threads));
    HX_RETURN_IF_ERROR(
        check_finite("fc2_weight", fc2.as<uint16_t>(), experts, fc2_elements, threads));
  }
  quantize_experts(s, 0, experts, fc1.as<uint16_t>(), fc2.as<uint16_t>());
  return {};
}

Status check_projection(
    const QuantizedProjection& p, const char* name, int64_t expert, int64_t rows, int64_t cols) {
  if (p.codes == nullptr || p.block_scales == nullptr) {
    return {ErrorCode::kNullPointer,
            fmt::format("{}: codes and block_scales of expert {} must not be null", name, expert)};
  }
  if (!std::isfinite(p.alpha)) {
    return {ErrorCode::kNonFiniteWeights,
            fmt::format(
                "{}: alpha of expert {} is {}, expected a finite number", name, expert, p.alpha)};
  }
  const int64_t blocks = (cols + kBlockSize - 1) / kBlockSize;
  for (int64_t i = 0; i < rows * blocks; ++i) {
    if (p.block_scales[i] >= kE4M3Nan) {
      return {ErrorCode::kNonFiniteWeights,
              fmt::format("{}: expert {}, row {}, block {}: block scale 0x{:02X} is {}",
                          name,
                          expert,
                          i / blocks,
                          i % blocks,
                          p.block_scales[i],
                          (p.block_scales[i] & 0x7F) == kE4M3Nan ? "NaN" : "negative")};
    }
  }
  return {};
}

// Copies checkpoint-order rows into groups group_of(row / 16).
template <typename GroupOf>
void store_projection(const QuantizedProjection& p,
                      int64_t rows,
                      int64_t cols,
                      int64_t padded_rows,
                      int64_t tile_k,
                      uint8_t* matrix,
                      const GroupOf& group_of) {
  const int64_t stored_cols = round_up(cols, kBlockSize);
  GroupBuilder builder(tile_k);
  for (int64_t first = 0; first < padded_rows; first += tiles::kGroupRows) {
    for (int64_t n = 0; n < tiles::kGroupRows; ++n) {
      const int64_t row = first + n;
      if (row < rows) {
        builder.copy(n,
                     p.codes + row * (stored_cols / 2),
                     p.block_scales + row * (stored_cols / kBlockSize),
                     stored_cols);
      } else {
        builder.pad(n, 0, kZeroScale);
      }
    }
    builder.store(matrix + group_of(first) * tiles::group_bytes(tile_k));
  }
}

void store_quantized_expert(ExpertWeights::Storage& s,
                            int64_t expert,
                            const QuantizedExpert& source) {
  const int64_t hidden = s.shape.hidden_size;
  const int64_t intermediate = s.shape.intermediate_size;
  const auto fc1_group = [&](bool gate) {
    return [&s, gate](int64_t row) { return fc1_group_of(s.shape, gate, row); };
  };
  uint8_t* fc1 = s.fc1_expert(expert);
  const auto index = static_cast<size_t>(expert);
  store_projection(
      source.up, intermediate, hidden, s.intermediate, s.hidden, fc1, fc1_group(false));
  s.fc1_up_alpha[index] = source.up.alpha;
  s.fc1_gate_alpha[index] = source.up.alpha;
  if (s.shape.gated) {
    store_projection(
        source.gate, intermediate, hidden, s.intermediate, s.hidden, fc1, fc1_group(true));
    s.fc1_gate_alpha[index] = source.gate.alpha;
  }
  store_projection(source.down,
                   hidden,
                   intermediate,
                   s.hidden,
                   s.intermediate,
                   s.fc2_expert(expert),
                   [](int64_t row) { return row / tiles::kGroupRows; });
  s.fc2_alpha[index] = source.down.alpha;
}

}  // namespace

std::unique_ptr<ExpertWeights::Storage> tiles_of_one_expert(const ExpertWeights::Storage& s) {
  ExpertShape shape = s.shape;
  shape.num_local_experts = 1;
  auto one = std::make_unique<ExpertWeights::Storage>(shape, s.num_threads);
  if (!one->allocate_tiles()) throw std::bad_alloc();
  return one;
}

bool ExpertWeights::Storage::allocate_tiles() {
  const double wanted =
      static_cast<double>(shape.num_local_experts) * static_cast<double>(fc1_bytes + fc2_bytes);
  if (wanted < 1e15) {
    fc1 = AlignedBuffer::zeroed(shape.num_local_experts * fc1_bytes);
    fc2 = AlignedBuffer::zeroed(shape.num_local_experts * fc2_bytes);
  }
  const auto experts = static_cast<size_t>(shape.num_local_experts);
  fc1_up_alpha.assign(experts, 1.0F);
  fc1_gate_alpha.assign(experts, 1.0F);
  fc2_alpha.assign(experts, 1.0F);
  return fc1 && fc2;
}

ExpertWeights::ExpertWeights(std::unique_ptr<Storage> storage) : storage_(std::move(storage)) {}
ExpertWeights::ExpertWeights(ExpertWeights&&) noexcept = default;
ExpertWeights& ExpertWeights::operator=(ExpertWeights&&) noexcept = default;
ExpertWeights::~ExpertWeights() = default;

Result<ExpertWeights> ExpertWeights::allocate(const ExpertShape& shape,
                                              const PrepareOptions& options) {
  if (shape.num_local_experts < 1 || shape.hidden_size < 1 || shape.intermediate_size < 1 ||
      shape.num_local_experts > kMaxSize || shape.hidden_size > kMaxSize ||
      shape.intermediate_size > kMaxSize) {
    return Status(ErrorCode::kInvalidShape,
                  fmt::format("shape: every size must be in 1..{}, got num_local_experts {}, "
                              "hidden_size {}, intermediate_size {}",
                              kMaxSize,
                              shape.num_local_experts,
                              shape.hidden_size,
                              shape.intermediate_size));
  }
  HX_RETURN_IF_ERROR(check_num_threads("num_threads", options.num_threads));
  Result<const Backend*> backend = find_backend(options.backend, options.device);
  if (!backend.ok()) return backend.status();
  return without_bad_alloc([&]() -> Result<ExpertWeights> {
    auto s = std::make_unique<Storage>(shape, options.num_threads);
    if ((*backend)->allocate_weights != nullptr) {
      Result<std::unique_ptr<DeviceWeights>> made = (*backend)->allocate_weights(shape, options);
      if (!made.ok()) return made.status();
      s->on_device = *std::move(made);
    } else if (!s->allocate_tiles()) {
      const double wanted = static_cast<double>(shape.num_local_experts) *
                            static_cast<double>(s->fc1_bytes + s->fc2_bytes);
      return Status(ErrorCode::kOutOfMemory,
                    fmt::format("weights: {:.3f} GB could not be allocated", wanted * 1e-9));
    }
    return ExpertWeights(std::move(s));
  });
}

Result<ExpertWeights> ExpertWeights::prepare(const ConstTensorView& fc1_weight,
                                             const ConstTensorView& fc2_weight,
                                             const PrepareOptions& options) {
  return without_bad_alloc([&]() -> Result<ExpertWeights> {
    const Result<ExpertShape> shape = shape_of(fc1_weight, fc2_weight, 3, options.device);
    if (!shape.ok()) return shape.status();
    Result<ExpertWeights> weights = allocate(*shape, options);
    if (!weights.ok()) return weights;
    HX_RETURN_IF_ERROR(quantize_stacks(
        *weights->storage_, fc1_weight, fc2_weight, options.refuse_nonfinite, options.stream));
    return weights;
  });
}

Status ExpertWeights::refresh(const ConstTensorView& fc1_weight,
                              const ConstTensorView& fc2_weight,
                              Stream stream) {
  return without_bad_alloc([&]() -> Status {
    const Result<ExpertShape> given = shape_of(fc1_weight, fc2_weight, 3, device());
    if (!given.ok()) return given.status();
    HX_RETURN_IF_ERROR(check_same(shape(), *given));
    return quantize_stacks(*storage_, fc1_weight, fc2_weight, false, stream);
  });
}

Status ExpertWeights::set_expert(int64_t expert,
                                 const ConstTensorView& fc1_weight,
                                 const ConstTensorView& fc2_weight,
                                 Stream stream) {
  return without_bad_alloc([&]() -> Status {
    HX_RETURN_IF_ERROR(check_expert(expert));
    Result<ExpertShape> given = shape_of(fc1_weight, fc2_weight, 2, device());
    if (!given.ok()) return given.status();
    given->num_local_experts = shape().num_local_experts;
    HX_RETURN_IF_ERROR(check_same(shape(), *given));
    if (storage_->on_device) {
      return storage_->on_device->set_expert(expert, fc1_weight, fc2_weight, stream);
    }
    quantize_experts(*storage_, expert, 1, fc1_weight.as<uint16_t>(), fc2_weight.as<uint16_t>());
    return {};
  });
}

Status ExpertWeights::set_quantized_expert(int64_t expert, const QuantizedExpert& source) {
  return without_bad_alloc([&]() -> Status {
    HX_RETURN_IF_ERROR(check_expert(expert));
    const int64_t hidden = shape().hidden_size;
    const int64_t intermediate = shape().intermediate_size;
    if (shape().gated) {
      HX_RETURN_IF_ERROR(check_projection(source.gate, "gate", expert, intermediate, hidden));
    }
    HX_RETURN_IF_ERROR(check_projection(source.up, "up", expert, intermediate, hidden));
    HX_RETURN_IF_ERROR(check_projection(source.down, "down", expert, hidden, intermediate));

    Storage& s = *storage_;
    if (!s.on_device) {
      store_quantized_expert(s, expert, source);
      return {};
    }
    const std::unique_ptr<Storage> one = tiles_of_one_expert(s);
    store_quantized_expert(*one, 0, source);
    return s.on_device->write_expert(expert, *one);
  });
}

Status ExpertWeights::check_expert(int64_t expert) const {
  if (expert >= 0 && expert < shape().num_local_experts) return {};
  return {ErrorCode::kInvalidArgument,
          fmt::format("expert: expected 0..{}, got {}", shape().num_local_experts - 1, expert)};
}

const ExpertShape& ExpertWeights::shape() const {
  return storage_->shape;
}
Device ExpertWeights::device() const {
  return storage_->on_device ? storage_->on_device->device() : Device::cpu();
}
std::string_view ExpertWeights::layout_name() const {
  return storage_->on_device ? storage_->on_device->layout_name() : "cpu-tiles";
}
int64_t ExpertWeights::size_bytes() const {
  if (storage_->on_device) return storage_->on_device->size_bytes();
  const int64_t alphas = 3 * static_cast<int64_t>(sizeof(float)) * shape().num_local_experts;
  return storage_->fc1.size() + storage_->fc2.size() + alphas;
}

}  // namespace hexpert
