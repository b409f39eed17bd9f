#include "hexpert/checkpoint.hpp"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "io/checkpoint_impl.hpp"
#include "io/io_support.hpp"
#include "io/json_text.hpp"
#include "io/mapped_file.hpp"

namespace hexpert {
namespace {

namespace fs = std::filesystem;
using io::in_quotes;
using io::TensorRef;

constexpr std::string_view kShardSuffix = ".safetensors";
constexpr std::string_view kIndexSuffix = ".index.json";

// The files of `directory` with a suffix, sorted.
Result<std::vector<std::string>> list_files(const std::string& directory, std::string_view suffix) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    std::string name = entry->path().filename().string();
    if (name.ends_with(suffix)) names.push_back(std::move(name));
  }
  if (error) {
    return Status(ErrorCode::kIoError, in_quotes(directory) + ": cannot list: " + error.message());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// The shard number and count of "name-00002-of-00007.safetensors", or nothing.
struct ShardNumber {
  std::string stem;  // "name"
  int64_t count = 0;
};
std::optional<ShardNumber> shard_number(std::string_view name) {
  name.remove_suffix(kShardSuffix.size());
  const std::size_t of = name.rfind("-of-");
  if (of == std::string_view::npos || of == 0) return std::nullopt;
  const std::size_t dash = name.rfind('-', of - 1);
  if (dash == std::string_view::npos) return std::nullopt;
  const std::string_view count = name.substr(of + 4);
  const std::string_view index = name.substr(dash + 1, of - dash - 1);
  ShardNumber number{std::string(name.substr(0, dash)), 0};
  int64_t ignored = 0;
  const auto parse = [](std::string_view text, int64_t* value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
    return error == std::errc() && end == text.data() + text.size() && *value >= 0;
  };
  if (!parse(count, &number.count) || !parse(index, &ignored)) return std::nullopt;
  return number;
}

// A directory without an index: where shards carry numbers, all of them must be there.
Status check_numbered_shards(const std::string& directory, const std::vector<std::string>& names) {
  std::map<std::pair<std::string, int64_t>, int64_t> present;
  for (const std::string& name : names) {
    if (const std::optional<ShardNumber> number = shard_number(name)) {
      ++present[{number->stem, number->count}];
    }
  }
  for (const auto& [set, count] : present) {
    if (count == set.second) continue;
    return {ErrorCode::kNotFound,
            in_quotes(directory) + ": expected " + std::to_string(set.second) + " shards of " +
                in_quotes(set.first) + ", found " + std::to_string(count)};
  }
  return Status::success();
}

Status open_files(const std::string& directory,
                  const std::vector<std::string>& names,
                  std::vector<SafetensorsFile>* files) {
  const std::string prefix = directory.empty() ? "" : directory + "/";
  for (const std::string& name : names) {
    Result<SafetensorsFile> file = SafetensorsFile::open(prefix + name);
    if (!file.ok()) return file.status();
    files->push_back(*std::move(file));
  }
  return Status::success();
}

bool by_name(const TensorRef& a, const TensorRef& b) {
  return a.info->name < b.info->name;
}

Status take_all_tensors(Checkpoint::Impl* impl) {
  for (const SafetensorsFile& file : impl->files) {
    for (const TensorInfo& tensor : file.tensors())
      impl->tensors.push_back({&file, &tensor});
  }
  std::sort(impl->tensors.begin(), impl->tensors.end(), by_name);
  const auto twice = std::adjacent_find(
      impl->tensors.begin(), impl->tensors.end(), [](const TensorRef& a, const TensorRef& b) {
        return a.info->name == b.info->name;
      });
  if (twice == impl->tensors.end()) return Status::success();
  return {ErrorCode::kInvalidFile,
          "tensor " + in_quotes(twice->info->name) + " lies in " + in_quotes(twice->file->path()) +
              " and in " + in_quotes(std::next(twice)->file->path())};
}

Status open_index(const std::string& path, Checkpoint::Impl* impl) {
  const Result<io::MappedFile> text = io::MappedFile::open(path);
  if (!text.ok()) return text.status();
  const Result<std::map<std::string, std::string>> index =
      io::parse_index(path, text->data(), text->size());
  if (!index.ok()) return index.status();

  std::map<std::string_view, std::size_t> shards;
  for (const auto& [tensor, shard] : *index)
    shards.emplace(shard, 0);
  std::vector<std::string> names;
  for (auto& [name, position] : shards) {
    position = names.size();
    names.emplace_back(name);
  }
  if (const Status opened = open_files(io::parent_directory(path), names, &impl->files);
      !opened.ok()) {
    return {opened.code(),
            in_quotes(path) + " names a shard that cannot be used: " + opened.message()};
  }
  for (const auto& [tensor, shard] : *index) {
    const SafetensorsFile& file = impl->files[shards.at(shard)];
    const TensorInfo* info = file.find(tensor);
    if (info == nullptr) {
      return {ErrorCode::kInvalidFile,
              in_quotes(path) + ": tensor " + in_quotes(tensor) + " is not in its shard " +
                  in_quotes(shard)};
    }
    impl->tensors.push_back({&file, info});  // the index is sorted
  }
  return Status::success();
}

Status open_directory(const std::string& path, Checkpoint::Impl* impl) {
  const Result<std::vector<std::string>> indices = list_files(path, kIndexSuffix);
  if (!indices.ok()) return indices.status();
  if (indices->size() > 1) {
    return {ErrorCode::kInvalidArgument,
            in_quotes(path) + ": expected one index, found " + in_quotes(indices->front()) +
                " and " + in_quotes(indices->at(1)) + ": give the one to use"};
  }
  if (indices->size() == 1) return open_index(path + "/" + indices->front(), impl);
  const Result<std::vector<std::string>> shards = list_files(path, kShardSuffix);
  if (!shards.ok()) return shards.status();
  if (shards->empty()) {
    return {ErrorCode::kNotFound,
            in_quotes(path) + ": expected *.safetensors or *.index.json, found neither"};
  }
  HX_RETURN_IF_ERROR(check_numbered_shards(path, *shards));
  HX_RETURN_IF_ERROR(open_files(path, *shards, &impl->files));
  return take_all_tensors(impl);
}

Status open_path(const std::string& path, Checkpoint::Impl* impl) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::directory) return open_directory(path, impl);
  if (path.ends_with(kIndexSuffix)) return open_index(path, impl);
  HX_RETURN_IF_ERROR(open_files("", {path}, &impl->files));
  return take_all_tensors(impl);
}

}  // namespace

std::string_view to_string(ExpertNaming naming) {
  switch (naming) {
    case ExpertNaming::kMixtral:
      return "mixtral";
    case ExpertNaming::kPerExpert:
      return "per-expert";
    case ExpertNaming::kStacked:
      return "stacked";
    case ExpertNaming::kCanonical:
      return "canonical";
  }
  return "unknown";
}

std::string_view to_string(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return "f32";
    case WeightFormat::kF16:
      return "f16";
    case WeightFormat::kBF16:
      return "bf16";
    case WeightFormat::kModelOpt:
      return "nvfp4 (modelopt)";
    case WeightFormat::kCompressedTensors:
      return "nvfp4 (compressed-tensors)";
    case WeightFormat::kCanonical:
      return "nvfp4 (canonical)";
  }
  return "unknown";
}

bool is_nvfp4(WeightFormat format) {
  return !io::dense_dtype(format).has_value();
}

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

Result<Checkpoint> Checkpoint::open(const std::string& path, StackedLayout stacked) {
  return io::without_bad_alloc([&]() -> Result<Checkpoint> {
    auto impl = std::make_unique<Impl>();
    HX_RETURN_IF_ERROR(open_path(path, impl.get()));
    Result<std::vector<io::LayerSource>> layers = io::find_layers(impl->tensors, stacked);
    if (!layers.ok()) {
      return Status(layers.status().code(), in_quotes(path) + ": " + layers.status().message());
    }
    impl->layers = *std::move(layers);
    for (const io::LayerSource& layer : impl->layers)
      impl->infos.push_back(layer.info);
    return Checkpoint(std::move(impl));
  });
}

const std::vector<MoeLayerInfo>& Checkpoint::layers() const {
  return impl_->infos;
}
const std::vector<SafetensorsFile>& Checkpoint::files() const {
  return impl_->files;
}

Result<const io::LayerSource*> Checkpoint::Impl::layer(std::string_view prefix) const {
  constexpr std::size_t kMostNames = 8;
  std::string names;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].info.prefix == prefix) return &layers[i];
    if (i < kMostNames) names += (i == 0 ? "" : ", ") + in_quotes(layers[i].info.prefix);
  }
  if (layers.size() > kMostNames) names += ", ...";
  return Status(ErrorCode::kNotFound,
                "layer " + in_quotes(prefix) + " does not exist; the layers with experts are: " +
                    (names.empty() ? "none" : names));
}

Result<const MoeLayerInfo*> Checkpoint::layer(std::string_view prefix) const {
  const Result<const io::LayerSource*> found = impl_->layer(prefix);
  if (!found.ok()) return found.status();
  return &(*found)->info;
}

}  // namespace hexpert
