#include "hexpert/safetensors.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "hexpert/format.hpp"
#include "io/io_support.hpp"
#include "io/json_text.hpp"
#include "io/mapped_file.hpp"

namespace hexpert {
namespace {

struct DTypeName {
  DType dtype;
  std::string_view name;
};
constexpr DTypeName kDTypeNames[] = {
    {DType::kU8, "U8"},
    {DType::kE4M3, "F8_E4M3"},
    {DType::kBF16, "BF16"},
    {DType::kF16, "F16"},
    {DType::kF32, "F32"},
    {DType::kI32, "I32"},
    {DType::kI64, "I64"},
};

}  // namespace

std::string_view safetensors_dtype(DType dtype) {
  for (const DTypeName& entry : kDTypeNames) {
    if (entry.dtype == dtype) return entry.name;
  }
  return "";
}

std::optional<DType> dtype_from_safetensors(std::string_view name) {
  for (const DTypeName& entry : kDTypeNames) {
    if (entry.name == name) return entry.dtype;
  }
  return std::nullopt;
}

void HostTensor::Free::operator()(void* data) const {
  std::free(data);
}

Result<HostTensor> HostTensor::allocate(DType dtype, const std::vector<int64_t>& shape) {
  constexpr int64_t kAlignment = 64;
  if (shape.size() > static_cast<std::size_t>(kMaxRank)) {
    return Status(ErrorCode::kInvalidShape,
                  "shape: expected at most " + std::to_string(kMaxRank) + " dimensions, got " +
                      std::to_string(shape.size()));
  }
  HostTensor tensor;
  TensorView& view = tensor.view_;
  view.dtype = dtype;
  view.rank = static_cast<int>(shape.size());
  int64_t count = 1;
  for (int i = view.rank; i-- > 0;) {
    view.shape[i] = shape[static_cast<std::size_t>(i)];
    view.strides[i] = count;
    if (view.shape[i] < 0 || __builtin_mul_overflow(count, view.shape[i], &count)) {
      return Status(ErrorCode::kInvalidShape,
                    "shape: no size in bytes for " + io::shape_text(shape));
    }
  }
  if (__builtin_mul_overflow(count, size_of(dtype), &tensor.size_bytes_) ||
      tensor.size_bytes_ > std::numeric_limits<int64_t>::max() - 2 * kAlignment) {
    return Status(ErrorCode::kInvalidShape, "shape: no size in bytes for " + io::shape_text(shape));
  }
  // An empty tensor gets memory too: its data pointer is never null.
  const int64_t bytes = round_up(std::max<int64_t>(tensor.size_bytes_, 1), kAlignment);
  tensor.data_.reset(std::aligned_alloc(kAlignment, static_cast<std::size_t>(bytes)));
  if (tensor.data_ == nullptr) {
    return Status(
        ErrorCode::kOutOfMemory,
        "cannot allocate " + std::to_string(bytes) + " bytes for " + describe(tensor.view_));
  }
  view.data = tensor.data_.get();
  return tensor;
}

struct SafetensorsFile::Impl {
  std::string path;
  io::MappedFile file;
  io::SafetensorsHeader header;
};

SafetensorsFile::SafetensorsFile(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;
SafetensorsFile::~SafetensorsFile() = default;

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  return io::without_bad_alloc([&]() -> Result<SafetensorsFile> {
    Result<io::MappedFile> file = io::MappedFile::open(path);
    if (!file.ok()) return file.status();
    Result<io::SafetensorsHeader> header =
        io::parse_safetensors_header(path, file->data(), file->size());
    if (!header.ok()) return header.status();
    return SafetensorsFile(
        std::unique_ptr<Impl>(new Impl{path, *std::move(file), *std::move(header)}));
  });
}

const std::string& SafetensorsFile::path() const {
  return impl_->path;
}
const std::vector<TensorInfo>& SafetensorsFile::tensors() const {
  return impl_->header.tensors;
}
const std::map<std::string, std::string>& SafetensorsFile::metadata() const {
  return impl_->header.metadata;
}
int64_t SafetensorsFile::file_bytes() const {
  return impl_->file.size();
}
int64_t SafetensorsFile::modified_ns() const {
  return impl_->file.modified_ns();
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const std::vector<TensorInfo>& all = tensors();
  const auto found = std::lower_bound(
      all.begin(), all.end(), name, [](const TensorInfo& tensor, std::string_view key) {
        return tensor.name < key;
      });
  return found != all.end() && found->name == name ? &*found : nullptr;
}

const uint8_t* SafetensorsFile::data(const TensorInfo& tensor) const {
  return impl_->file.data() + impl_->header.data_offset + tensor.offset;
}

Result<ConstTensorView> SafetensorsFile::tensor(std::string_view name) const {
  const TensorInfo* info = find(name);
  const std::string place = io::in_quotes(path()) + ": tensor " + io::in_quotes(name) + ": ";
  if (info == nullptr) return Status(ErrorCode::kNotFound, place + "does not exist");
  const std::optional<DType> dtype = dtype_from_safetensors(info->dtype);
  if (!dtype) {
    return Status(ErrorCode::kInvalidDtype,
                  place + "cannot use dtype " + io::in_quotes(info->dtype));
  }
  if (info->shape.size() > static_cast<std::size_t>(kMaxRank)) {
    return Status(ErrorCode::kInvalidShape,
                  place + "expected at most " + std::to_string(kMaxRank) + " dimensions, got " +
                      std::to_string(info->shape.size()));
  }
  const uint8_t* first = data(*info);
  if (reinterpret_cast<uintptr_t>(first) % static_cast<uintptr_t>(size_of(*dtype)) != 0) {
    return Status(ErrorCode::kMisaligned,
                  place + "expected an offset that is a multiple of " +
                      std::to_string(size_of(*dtype)) + " in the file, got " +
                      std::to_string(impl_->header.data_offset + info->offset));
  }
  ConstTensorView view(first, *dtype, {});
  view.rank = static_cast<int>(info->shape.size());
  int64_t stride = 1;
  for (int i = view.rank; i-- > 0;) {
    view.shape[i] = info->shape[static_cast<std::size_t>(i)];
    view.strides[i] = stride;
    stride *= view.shape[i];
  }
  return view;
}

Result<HostTensor> SafetensorsFile::load(std::string_view name) const {
  return io::without_bad_alloc([&]() -> Result<HostTensor> {
    const std::string place = io::in_quotes(path()) + ": tensor " + io::in_quotes(name) + ": ";
    const TensorInfo* info = find(name);
    if (info == nullptr) return Status(ErrorCode::kNotFound, place + "does not exist");
    const std::optional<DType> dtype = dtype_from_safetensors(info->dtype);
    if (!dtype) {
      return Status(ErrorCode::kInvalidDtype,
                    place + "cannot use dtype " + io::in_quotes(info->dtype));
    }
    Result<HostTensor> tensor = HostTensor::allocate(*dtype, info->shape);
    if (!tensor.ok()) return Status(tensor.status().code(), place + tensor.status().message());
    std::memcpy(tensor->as<uint8_t>(), data(*info), static_cast<std::size_t>(info->size_bytes));
    return tensor;
  });
}

void SafetensorsFile::release(const uint8_t* first, int64_t bytes) const {
  io::release_pages(first, bytes);
}

}  // namespace hexpert
