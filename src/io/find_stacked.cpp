// Layers whose experts lie in one tensor: Hugging Face and Megatron stacks, and the canonical
// arrangement.
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "io/checkpoint_impl.hpp"
#include "io/io_support.hpp"

namespace hexpert::io {
namespace {

Status invalid(std::string message) {
  return {ErrorCode::kInvalidFile, std::move(message)};
}

std::string describe(const TensorRef& tensor) {
  return in_quotes(tensor.info->name) + " " + shape_text(tensor.info->shape) + " " +
         in_quotes(tensor.info->dtype);
}

// [outer, inner] of each expert of a stack.
struct Inner {
  int64_t outer = 0;
  int64_t inner = 0;
};

// hidden_size and intermediate_size under one reading of the stacks; 0 when it does not fit.
struct Reading {
  int64_t hidden = 0;
  int64_t intermediate = 0;
  bool fits() const { return hidden > 0; }
};
Reading read_rows(Inner fc1, Inner fc2, int64_t halves) {
  const bool fits = fc1.inner == fc2.outer && fc1.outer == halves * fc2.inner;
  return fits ? Reading{fc2.outer, fc2.inner} : Reading{};
}
Reading read_transposed(Inner fc1, Inner fc2, int64_t halves) {
  const bool fits = fc1.outer == fc2.inner && fc1.inner == halves * fc2.outer;
  return fits ? Reading{fc2.inner, fc2.outer} : Reading{};
}

std::string sizes_text(const Reading& reading) {
  return "hidden_size " + std::to_string(reading.hidden) + ", intermediate_size " +
         std::to_string(reading.intermediate);
}

Result<std::pair<Reading, bool>> choose_reading(
    const std::string& text, Inner fc1, Inner fc2, int64_t halves, StackedLayout stacked) {
  const Reading rows = read_rows(fc1, fc2, halves);
  const Reading transposed = read_transposed(fc1, fc2, halves);
  if (stacked == StackedLayout::kAuto && rows.fits() && transposed.fits()) {
    return Status(ErrorCode::kUnsupported,
                  text + " can be read as " + sizes_text(rows) +
                      " (a row is an output feature) and as " + sizes_text(transposed) +
                      " (transposed): state the stacked layout");
  }
  if (rows.fits() && stacked != StackedLayout::kInputRows) return std::pair(rows, false);
  if (transposed.fits() && stacked != StackedLayout::kOutputRows) {
    return std::pair(transposed, true);
  }
  return invalid(text + " do not fit together" +
                 (stacked == StackedLayout::kAuto ? "" : " in the stated layout"));
}

Status check_stack(const TensorRef& tensor, const TensorRef& like) {
  const std::vector<int64_t>& shape = tensor.info->shape;
  if (shape.size() != 3 || shape[0] < 1 || shape[1] < 1 || shape[2] < 1) {
    return invalid("expected [experts, rows, cols], got " + describe(tensor));
  }
  if (!dense_format(tensor.info->dtype)) {
    return {ErrorCode::kUnsupported, "expected BF16, F16 or F32, got " + describe(tensor)};
  }
  if (tensor.info->dtype != like.info->dtype || shape[0] != like.info->shape[0]) {
    return invalid("expected the dtype and the experts of " + describe(like) + ", got " +
                   describe(tensor));
  }
  return Status::success();
}

Inner inner_of(const TensorRef& tensor) {
  return {tensor.info->shape[1], tensor.info->shape[2]};
}

// Sizes of a canonical layer from the metadata of its file.
Result<ExpertShape> canonical_shape(const TensorRef& tensor, const std::string& prefix) {
  constexpr int64_t kLargest = int64_t{1} << 40;
  const auto& metadata = tensor.file->metadata();
  const auto entry = metadata.find(kLayerMetadata + prefix);
  if (entry == metadata.end()) {
    return invalid("metadata " + in_quotes(kLayerMetadata + prefix) + " is missing in " +
                   in_quotes(tensor.file->path()));
  }
  const auto json = nlohmann::json::parse(entry->second, nullptr, false);
  ExpertShape shape;
  const std::pair<const char*, int64_t*> fields[] = {
      {"num_experts", &shape.num_local_experts},
      {"hidden_size", &shape.hidden_size},
      {"intermediate_size", &shape.intermediate_size}};
  for (const auto& [name, value] : fields) {
    const auto field = json.is_object() ? json.find(name) : json.end();
    if (!json.is_object() || field == json.end() || !field->is_number_unsigned() ||
        field->get<uint64_t>() < 1 || field->get<uint64_t>() > static_cast<uint64_t>(kLargest)) {
      return invalid("metadata " + in_quotes(kLayerMetadata + prefix) + ": expected " + name +
                     " in 1.." + std::to_string(kLargest) + ", got " + in_quotes(entry->second));
    }
    *value = field->get<int64_t>();
  }
  const auto gated = json.find("gated");
  if (gated == json.end() || !gated->is_boolean()) {
    return invalid("metadata " + in_quotes(kLayerMetadata + prefix) +
                   ": expected gated to be true or false, got " + in_quotes(entry->second));
  }
  shape.gated = gated->get<bool>();
  return shape;
}

}  // namespace

std::optional<DType> dense_dtype(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return DType::kF32;
    case WeightFormat::kF16:
      return DType::kF16;
    case WeightFormat::kBF16:
      return DType::kBF16;
    default:
      return std::nullopt;
  }
}

std::optional<WeightFormat> dense_format(std::string_view dtype) {
  for (const WeightFormat format : {WeightFormat::kF32, WeightFormat::kF16, WeightFormat::kBF16}) {
    if (safetensors_dtype(*dense_dtype(format)) == dtype) return format;
  }
  return std::nullopt;
}

Status build_stacked(const StackedTensors& tensors, StackedLayout stacked, LayerSource* layer) {
  MoeLayerInfo& info = layer->info;
  const std::string place = place_of(info.prefix);
  const bool joined = static_cast<bool>(tensors.gate_up);
  if (joined && (tensors.up || tensors.gate)) {
    return invalid(place + "gate_up_proj stands next to gate_proj or up_proj");
  }
  const TensorRef& fc1 = joined ? tensors.gate_up : tensors.up;
  if (!fc1 || !tensors.down) {
    return invalid(place + "expected gate_up_proj or up_proj, and down_proj; " +
                   (fc1 ? "down_proj" : "the first") + " is missing");
  }
  for (const TensorRef* tensor : {&tensors.down, &fc1, &tensors.gate}) {
    if (!*tensor) continue;
    if (const Status checked = check_stack(*tensor, tensors.down); !checked.ok()) {
      return {checked.code(), place + checked.message()};
    }
  }
  if (tensors.gate && tensors.gate.info->shape != fc1.info->shape) {
    return invalid(place + "expected equal shapes, got " + describe(tensors.gate) + " and " +
                   describe(fc1));
  }
  const Inner inner1 = inner_of(fc1);
  const Inner inner2 = inner_of(tensors.down);
  const Result<std::pair<Reading, bool>> chosen =
      choose_reading(place + describe(fc1) + " and " + describe(tensors.down),
                     inner1,
                     inner2,
                     joined ? 2 : 1,
                     stacked);
  if (!chosen.ok()) return chosen.status();
  const Reading reading = chosen->first;  // Clang 14 captures no structured binding
  const bool transposed = chosen->second;

  info.naming = ExpertNaming::kStacked;
  info.format = *dense_format(fc1.info->dtype);
  info.shape = {fc1.info->shape[0], reading.hidden, reading.intermediate, joined || !!tensors.gate};
  const int64_t width = size_of(*dense_dtype(info.format));
  const auto matrix = [&](const TensorRef& tensor, int64_t expert, bool fc2, int64_t first_row) {
    const Inner inner = inner_of(tensor);
    ProjectionSource source;
    source.rows = fc2 ? reading.hidden : reading.intermediate;
    source.cols = fc2 ? reading.intermediate : reading.hidden;
    source.row_stride = transposed ? 1 : inner.inner;
    source.col_stride = transposed ? inner.inner : 1;
    source.weights = tensor.data() +
                     (expert * inner.outer * inner.inner + first_row * source.row_stride) * width;
    return source;
  };
  for (int64_t e = 0; e < info.shape.num_local_experts; ++e) {
    ExpertSource& expert = layer->experts.emplace_back();
    expert.down = matrix(tensors.down, e, true, 0);
    expert.up = matrix(fc1, e, false, joined ? reading.intermediate : 0);
    if (joined) expert.gate = matrix(fc1, e, false, 0);
    if (tensors.gate) expert.gate = matrix(tensors.gate, e, false, 0);
  }
  return Status::success();
}

Status build_canonical(const CanonicalTensors& tensors, LayerSource* layer) {
  MoeLayerInfo& info = layer->info;
  const std::string place = place_of(info.prefix);
  if (!tensors.fc1_data) return invalid(place + "fc1_data is missing");
  const Result<ExpertShape> shape = canonical_shape(tensors.fc1_data, info.prefix);
  if (!shape.ok()) return {shape.status().code(), place + shape.status().message()};
  const int64_t experts = shape->num_local_experts;
  const int64_t rows1 = shape->canonical_fc1_rows();
  const int64_t cols1 = shape->padded_hidden_size();
  const int64_t rows2 = shape->padded_hidden_size();
  const int64_t cols2 = shape->padded_intermediate_size();
  struct Field {
    const char* name;
    const TensorRef* tensor;
    const char* dtype;
    std::vector<int64_t> expected;
    bool optional;
  };
  const Field fields[] = {
      {"fc1_data", &tensors.fc1_data, "U8", {experts, rows1, cols1 / 2}, false},
      {"fc1_scale_swizzled", &tensors.fc1_scale, "F8_E4M3", {experts, rows1, cols1 / 16}, false},
      {"fc1_alpha", &tensors.fc1_alpha, "F32", {experts}, false},
      {"fc1_gate_alpha", &tensors.fc1_gate_alpha, "F32", {experts}, true},
      {"fc2_data", &tensors.fc2_data, "U8", {experts, rows2, cols2 / 2}, false},
      {"fc2_scale_swizzled", &tensors.fc2_scale, "F8_E4M3", {experts, rows2, cols2 / 16}, false},
      {"fc2_alpha", &tensors.fc2_alpha, "F32", {experts}, false},
      {"fc2_input_scale", &tensors.fc2_input_scale, "F32", {1}, true},
  };
  for (const Field& field : fields) {
    if (!*field.tensor) {
      if (field.optional) continue;
      return invalid(place + field.name + " is missing");
    }
    const TensorInfo& tensor = *field.tensor->info;
    if (tensor.dtype != field.dtype || tensor.shape != field.expected) {
      return invalid(place + "expected " + field.name + " " + shape_text(field.expected) + " " +
                     field.dtype + ", got " + describe(*field.tensor));
    }
  }
  info.naming = ExpertNaming::kCanonical;
  info.format = WeightFormat::kCanonical;
  info.shape = *shape;
  const TensorRef& gate_alpha = tensors.fc1_gate_alpha ? tensors.fc1_gate_alpha : tensors.fc1_alpha;
  for (int64_t e = 0; e < experts; ++e) {
    ExpertSource& expert = layer->experts.emplace_back();
    const auto fc1 = [&](bool gate) {
      ProjectionSource source;
      source.weights = tensors.fc1_data.data() + e * rows1 * cols1 / 2;
      source.block_scales = tensors.fc1_scale.data() + e * rows1 * cols1 / 16;
      source.outer = (gate ? gate_alpha : tensors.fc1_alpha).data() + e * 4;
      source.rows = shape->intermediate_size;
      source.cols = shape->hidden_size;
      source.gate_rows = gate;
      return source;
    };
    expert.up = fc1(false);
    if (shape->gated) expert.gate = fc1(true);
    expert.down.weights = tensors.fc2_data.data() + e * rows2 * cols2 / 2;
    expert.down.block_scales = tensors.fc2_scale.data() + e * rows2 * cols2 / 16;
    expert.down.outer = tensors.fc2_alpha.data() + e * 4;
    expert.down.rows = shape->hidden_size;
    expert.down.cols = shape->intermediate_size;
  }
  return Status::success();
}

}  // namespace hexpert::io
