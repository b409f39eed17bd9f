// From tensor names to layers and experts.
#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <map>
#include <utility>

#include "io/checkpoint_impl.hpp"
#include "io/io_support.hpp"

namespace hexpert::io {
namespace {

enum Projection : std::size_t { kGate, kUp, kDown, kProjections };
enum Part : std::size_t {
  kWeight,
  kPacked,
  kBlockScale,
  kDecodeScale,
  kEncodeScale,
  kIgnored,  // of activations, which are quantized online
  kParts
};

template <typename Value>
struct Named {
  std::string_view name;
  Value value;
};
constexpr Named<Part> kPartNames[] = {
    {"weight", kWeight},
    {"weight_packed", kPacked},
    {"weight_scale", kBlockScale},
    {"weight_scale_2", kDecodeScale},
    {"weight_global_scale", kEncodeScale},
    {"input_scale", kIgnored},
    {"input_global_scale", kIgnored},
};
constexpr Named<Projection> kMixtralNames[] = {{"w1", kGate}, {"w3", kUp}, {"w2", kDown}};
constexpr Named<Projection> kProjectionNames[] = {
    {"gate_proj", kGate}, {"up_proj", kUp}, {"down_proj", kDown}};
constexpr Named<TensorRef StackedTensors::*> kStackedNames[] = {
    {"gate_up_proj", &StackedTensors::gate_up},
    {"gate_proj", &StackedTensors::gate},
    {"up_proj", &StackedTensors::up},
    {"down_proj", &StackedTensors::down},
};
constexpr Named<TensorRef CanonicalTensors::*> kCanonicalNames[] = {
    {"fc1_data", &CanonicalTensors::fc1_data},
    {"fc1_scale_swizzled", &CanonicalTensors::fc1_scale},
    {"fc1_alpha", &CanonicalTensors::fc1_alpha},
    {"fc1_gate_alpha", &CanonicalTensors::fc1_gate_alpha},
    {"fc2_data", &CanonicalTensors::fc2_data},
    {"fc2_scale_swizzled", &CanonicalTensors::fc2_scale},
    {"fc2_alpha", &CanonicalTensors::fc2_alpha},
    {"fc2_input_scale", &CanonicalTensors::fc2_input_scale},
};

template <typename Value, std::size_t n>
const Value* look_up(const Named<Value> (&names)[n], std::string_view name) {
  for (const Named<Value>& entry : names) {
    if (entry.name == name) return &entry.value;
  }
  return nullptr;
}

using RawExpert = std::array<std::array<TensorRef, kParts>, kProjections>;

// The tensors of one layer, by role.
struct RawLayer {
  std::map<int64_t, RawExpert> mixtral;
  std::map<int64_t, RawExpert> per_expert;
  StackedTensors stacked;
  CanonicalTensors canonical;
  bool has_stacked = false;
  bool has_canonical = false;
  std::vector<TensorRef> tensors;
  std::vector<TensorRef> unknown;
};

// "7.up_proj.weight" -> 7, "up_proj", "weight".
struct ExpertName {
  int64_t expert = 0;
  std::string_view projection;
  std::string_view part;
};
std::optional<ExpertName> split_expert_name(std::string_view rest) {
  ExpertName name;
  const char* const end = rest.data() + rest.size();
  const auto [after, error] = std::from_chars(rest.data(), end, name.expert);
  if (error != std::errc() || after == end || *after != '.' || name.expert < 0) return std::nullopt;
  if (rest.front() == '-' || (rest.front() == '0' && after != rest.data() + 1)) return std::nullopt;
  rest.remove_prefix(static_cast<std::size_t>(after - rest.data()) + 1);
  const std::size_t dot = rest.find('.');
  if (dot == std::string_view::npos) return std::nullopt;
  name.projection = rest.substr(0, dot);
  name.part = rest.substr(dot + 1);
  return name;
}

// Files a tensor under its role; false when it has none.
bool take(const TensorRef& tensor, std::string_view rest, RawLayer* layer) {
  if (const std::optional<ExpertName> name = split_expert_name(rest)) {
    const Part* part = look_up(kPartNames, name->part);
    if (part == nullptr) return false;
    if (const Projection* projection = look_up(kMixtralNames, name->projection)) {
      layer->mixtral[name->expert][*projection][*part] = tensor;
      return true;
    }
    if (const Projection* projection = look_up(kProjectionNames, name->projection)) {
      layer->per_expert[name->expert][*projection][*part] = tensor;
      return true;
    }
    return false;
  }
  if (const auto* field = look_up(kCanonicalNames, rest)) {
    layer->canonical.*(*field) = tensor;
    return layer->has_canonical = true;
  }
  constexpr std::string_view kWeightSuffix = ".weight";
  if (rest.ends_with(kWeightSuffix)) rest.remove_suffix(kWeightSuffix.size());
  if (const auto* field = look_up(kStackedNames, rest)) {
    if (layer->stacked.*(*field)) return false;
    layer->stacked.*(*field) = tensor;
    return layer->has_stacked = true;
  }
  return false;
}

Status invalid(std::string message) {
  return {ErrorCode::kInvalidFile, std::move(message)};
}

// Expert ids must be 0, 1, 2, ... without a hole.
Status check_ids(const std::string& prefix, const std::map<int64_t, RawExpert>& experts) {
  constexpr int kMostNames = 8;
  const int64_t last = experts.rbegin()->first;
  const auto count = static_cast<int64_t>(experts.size());
  if (last == count - 1) return Status::success();
  std::string names;
  int named = 0;
  for (int64_t id = 0; id < last && named < kMostNames; ++id) {
    if (experts.count(id) != 0) continue;
    names += (named++ == 0 ? "" : ", ") + std::to_string(id);
  }
  const int64_t missing = last - (count - 1);
  if (missing > named) names += ", ...";
  return invalid(place_of(prefix) + "expected experts 0.." + std::to_string(last) + ", " +
                 std::to_string(missing) + " missing: " + names);
}

std::string describe(const TensorRef& tensor) {
  return in_quotes(tensor.info->name) + " " + shape_text(tensor.info->shape) + " " +
         in_quotes(tensor.info->dtype);
}

// A tensor of one F32.
Status check_scalar(const TensorRef& tensor) {
  const std::vector<int64_t>& shape = tensor.info->shape;
  const bool one = shape.empty() || (shape.size() == 1 && shape[0] == 1);
  if (one && tensor.info->dtype == "F32") return Status::success();
  return invalid("expected one F32, got " + describe(tensor));
}

// Reads one projection and the format it is in. rows and cols are those of the tensor; the cols of
// NVFP4 count the padding to whole blocks.
Status build_projection(const std::array<TensorRef, kParts>& parts,
                        ProjectionSource* source,
                        WeightFormat* format) {
  const TensorRef& weight = parts[kPacked] ? parts[kPacked] : parts[kWeight];
  if (!weight || (parts[kPacked] && parts[kWeight])) {
    return invalid(weight ? "has both weight and weight_packed" : "has no weight");
  }
  const std::vector<int64_t>& shape = weight.info->shape;
  if (shape.size() != 2 || shape[0] < 1 || shape[1] < 1) {
    return invalid("expected a matrix, got " + describe(weight));
  }
  source->weights = weight.data();
  source->rows = shape[0];
  source->cols = shape[1];
  const bool has_scales = parts[kBlockScale] || parts[kDecodeScale] || parts[kEncodeScale];
  const std::optional<WeightFormat> dense = dense_format(weight.info->dtype);
  if (dense && !has_scales && !parts[kPacked]) {
    source->row_stride = source->cols;
    source->col_stride = 1;
    *format = *dense;
    return Status::success();
  }
  if (weight.info->dtype != "U8") {
    return {ErrorCode::kUnsupported,
            "expected BF16, F16, F32 or NVFP4 in U8, got " + describe(weight)};
  }
  *format = parts[kPacked] ? WeightFormat::kCompressedTensors : WeightFormat::kModelOpt;
  const TensorRef& outer = parts[parts[kPacked] ? kEncodeScale : kDecodeScale];
  if (!parts[kBlockScale] || !outer || (parts[kEncodeScale] && parts[kDecodeScale])) {
    return invalid(parts[kPacked] ? "expected weight_packed, weight_scale and weight_global_scale"
                                  : "expected weight, weight_scale and weight_scale_2");
  }
  const TensorInfo& scales = *parts[kBlockScale].info;
  if (scales.dtype != "F8_E4M3" || shape[1] % 8 != 0 ||
      scales.shape != std::vector<int64_t>{shape[0], shape[1] / 8}) {
    return invalid("expected block scales F8_E4M3 [rows, cols / 16] for " + describe(weight) +
                   ", got " + describe(parts[kBlockScale]));
  }
  HX_RETURN_IF_ERROR(check_scalar(outer));
  source->cols = 2 * shape[1];
  source->block_scales = parts[kBlockScale].data();
  source->outer = outer.data();
  return Status::success();
}

// NVFP4 columns may be padded to whole blocks; the rows of the other projection tell the true size.
int64_t stored_cols(WeightFormat format, int64_t cols) {
  return is_nvfp4(format) ? round_up(cols, kBlockSize) : cols;
}

Status build_per_expert(const std::map<int64_t, RawExpert>& experts,
                        ExpertNaming naming,
                        LayerSource* layer) {
  const auto& names = naming == ExpertNaming::kMixtral ? kMixtralNames : kProjectionNames;
  MoeLayerInfo& info = layer->info;
  HX_RETURN_IF_ERROR(check_ids(info.prefix, experts));
  info.naming = naming;
  info.shape.num_local_experts = static_cast<int64_t>(experts.size());
  info.shape.gated = std::any_of(experts.begin(), experts.end(), [](const auto& entry) {
    const auto& parts = entry.second[kGate];
    return std::any_of(parts.begin(), parts.end(), [](const TensorRef& part) { return !!part; });
  });
  layer->experts.resize(experts.size());
  for (const auto& [id, raw] : experts) {
    ExpertSource& expert = layer->experts[static_cast<std::size_t>(id)];
    ProjectionSource* const sources[kProjections] = {&expert.gate, &expert.up, &expert.down};
    // down first: its shape is what the others must agree with.
    for (const Projection projection : {kDown, kUp, kGate}) {
      if (projection == kGate && !info.shape.gated) continue;
      const auto name = std::find_if(std::begin(names), std::end(names), [&](const auto& entry) {
        return entry.value == projection;
      });
      const std::string place = place_of(info.prefix, id, name->name);
      ProjectionSource* source = sources[projection];
      WeightFormat format{};
      if (const Status built = build_projection(raw[projection], source, &format); !built.ok()) {
        return {built.code(), place + built.message()};
      }
      if (id == 0 && projection == kDown) info.format = format;
      if (format != info.format) {
        return invalid(place + "expected " + std::string(to_string(info.format)) +
                       " as in expert 0, got " + std::string(to_string(format)));
      }
      if (projection == kDown) {
        if (id == 0) info.shape.hidden_size = source->rows;
        // The true intermediate size is the number of rows of up; it is checked there.
        if (id == 0) info.shape.intermediate_size = source->cols;
        continue;
      }
      if (id == 0 && projection == kUp && stored_cols(format, source->rows) == expert.down.cols) {
        info.shape.intermediate_size = source->rows;
      }
      const int64_t cols = stored_cols(format, info.shape.hidden_size);
      if (source->rows != info.shape.intermediate_size || source->cols != cols) {
        return invalid(
            place + "expected " + shape_text(std::array{info.shape.intermediate_size, cols}) +
            " to fit expert 0, got " + shape_text(std::array{source->rows, source->cols}));
      }
      source->cols = info.shape.hidden_size;
    }
    const int64_t cols = stored_cols(info.format, info.shape.intermediate_size);
    if (expert.down.rows != info.shape.hidden_size || expert.down.cols != cols) {
      return invalid(place_of(info.prefix, id, std::end(names)[-1].name) + "expected " +
                     shape_text(std::array{info.shape.hidden_size, cols}) +
                     " to fit expert 0, got " +
                     shape_text(std::array{expert.down.rows, expert.down.cols}));
    }
    expert.down.cols = info.shape.intermediate_size;
  }
  return Status::success();
}

Status build_layer(const RawLayer& raw, StackedLayout stacked, LayerSource* layer) {
  const int kinds = static_cast<int>(!raw.mixtral.empty()) +
                    static_cast<int>(!raw.per_expert.empty()) + static_cast<int>(raw.has_stacked) +
                    static_cast<int>(raw.has_canonical);
  if (kinds > 1) {
    return invalid(place_of(layer->info.prefix) + "experts under more than one kind of names: " +
                   in_quotes(raw.tensors.front().info->name) + ", " +
                   in_quotes(raw.tensors.back().info->name));
  }
  if (!raw.unknown.empty()) {
    return {ErrorCode::kUnsupported,
            place_of(layer->info.prefix) + "cannot use " + describe(raw.unknown.front()) +
                ", which would change what the experts compute"};
  }
  layer->tensors = raw.tensors;
  if (!raw.mixtral.empty()) {
    HX_RETURN_IF_ERROR(build_per_expert(raw.mixtral, ExpertNaming::kMixtral, layer));
  } else if (!raw.per_expert.empty()) {
    HX_RETURN_IF_ERROR(build_per_expert(raw.per_expert, ExpertNaming::kPerExpert, layer));
  } else if (raw.has_stacked) {
    HX_RETURN_IF_ERROR(build_stacked(raw.stacked, stacked, layer));
  } else {
    HX_RETURN_IF_ERROR(build_canonical(raw.canonical, layer));
  }
  set_bytes(layer);
  return Status::success();
}

// "layer.2" before "layer.10".
bool natural_less(std::string_view a, std::string_view b) {
  const auto digits = [](std::string_view text) {
    return std::min(text.find_first_not_of("0123456789"), text.size());
  };
  while (!a.empty() && !b.empty()) {
    const std::size_t na = digits(a);
    const std::size_t nb = digits(b);
    if (na > 0 && nb > 0) {
      if (na != nb) return na < nb;
      const int order = a.substr(0, na).compare(b.substr(0, nb));
      if (order != 0) return order < 0;
      a.remove_prefix(na);
      b.remove_prefix(nb);
      continue;
    }
    if (a.front() != b.front()) return a.front() < b.front();
    a.remove_prefix(1);
    b.remove_prefix(1);
  }
  return a.size() < b.size();
}

}  // namespace

std::string place_of(const std::string& prefix) {
  return "layer " + in_quotes(prefix) + ": ";
}
std::string place_of(const std::string& prefix, int64_t expert, std::string_view projection) {
  return place_of(prefix) + "expert " + std::to_string(expert) + " " + std::string(projection) +
         ": ";
}

void set_bytes(LayerSource* layer) {
  const ExpertShape& shape = layer->info.shape;
  layer->info.source_bytes = 0;
  for (const TensorRef& tensor : layer->tensors)
    layer->info.source_bytes += tensor.info->size_bytes;
  layer->info.nvfp4_bytes =
      shape.num_local_experts *
      ((shape.gated ? 2 : 1) * nvfp4_projection_bytes(shape.intermediate_size, shape.hidden_size) +
       nvfp4_projection_bytes(shape.hidden_size, shape.intermediate_size));
}

Result<std::vector<LayerSource>> find_layers(const std::vector<TensorRef>& tensors,
                                             StackedLayout stacked) {
  constexpr std::string_view kExperts = "experts.";
  std::map<std::string_view, RawLayer> raw;
  for (const TensorRef& tensor : tensors) {
    const std::string_view name = tensor.info->name;
    const std::size_t at = name.rfind(kExperts);
    // "shared_experts." is another thing.
    if (at == std::string_view::npos || (at > 0 && name[at - 1] != '.')) continue;
    RawLayer& layer = raw[name.substr(0, at == 0 ? 0 : at - 1)];
    const bool taken = take(tensor, name.substr(at + kExperts.size()), &layer);
    (taken ? layer.tensors : layer.unknown).push_back(tensor);
  }
  std::vector<LayerSource> layers;
  for (const auto& [prefix, layer] : raw) {
    if (layer.tensors.empty()) continue;  // names that mean nothing here are passed over
    LayerSource& source = layers.emplace_back();
    source.info.prefix = prefix;
    HX_RETURN_IF_ERROR(build_layer(layer, stacked, &source));
  }
  std::sort(layers.begin(), layers.end(), [](const LayerSource& a, const LayerSource& b) {
    return natural_less(a.info.prefix, b.info.prefix);
  });
  return layers;
}

}  // namespace hexpert::io
