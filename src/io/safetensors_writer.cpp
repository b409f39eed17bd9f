#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "hexpert/format.hpp"
#include "hexpert/safetensors.hpp"
#include "io/io_support.hpp"
#include "io/json_text.hpp"

namespace hexpert {
namespace {

constexpr int64_t kDataAlignment = 64;  // of the data section in the file

struct Extent {
  int64_t offset = 0;  // in the data section
  int64_t size_bytes = 0;
  int64_t written = 0;
};

Status write_all(int fd, const std::string& path, const void* data, int64_t bytes, int64_t offset) {
  constexpr int64_t kLargestWrite = int64_t{1} << 30;
  const auto* next = static_cast<const uint8_t*>(data);
  while (bytes > 0) {
    const auto chunk = static_cast<std::size_t>(std::min(bytes, kLargestWrite));
    const ssize_t done = ::pwrite(fd, next, chunk, offset);
    if (done < 0) {
      if (errno == EINTR) continue;
      return io::system_error("cannot write", path);
    }
    next += done;
    offset += done;
    bytes -= done;
  }
  return Status::success();
}

// Text as a JSON string, or none when it is no UTF-8.
std::optional<std::string> json_string(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

}  // namespace

struct SafetensorsWriter::Impl {
  std::string path;
  std::string partial_path;
  io::FileDescriptor file;
  std::string header;  // written last: until then the file is no safetensors file
  std::vector<TensorSpec> specs;
  std::vector<Extent> extents;                              // of each spec
  std::unordered_map<std::string_view, std::size_t> index;  // name -> spec
  bool created = false;                                     // partial_path is ours to remove

  ~Impl() {
    if (created) ::unlink(partial_path.c_str());
  }
  Status place_tensors();
  Result<std::string> make_header(const std::map<std::string, std::string>& metadata) const;
  Status open_partial();
  int64_t data_offset() const { return static_cast<int64_t>(header.size()); }
  Status refuse(std::string_view name, const std::string& why) const {
    return {ErrorCode::kInvalidArgument,
            io::in_quotes(path) + ": tensor " + io::in_quotes(name) + ": " + why};
  }
};

// Wider elements first, so that every tensor is aligned to its element size.
Status SafetensorsWriter::Impl::place_tensors() {
  extents.resize(specs.size());
  std::vector<std::size_t> order(specs.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [this](std::size_t a, std::size_t b) {
    return io::dtype_bits(specs[a].dtype) > io::dtype_bits(specs[b].dtype);
  });
  int64_t end = 0;
  for (const std::size_t i : order) {
    const TensorSpec& spec = specs[i];
    if (spec.name == "__metadata__" || !index.emplace(spec.name, i).second) {
      return refuse(spec.name, "the name is taken");
    }
    int64_t bits = io::dtype_bits(spec.dtype);
    if (bits == 0) return refuse(spec.name, "unknown dtype " + io::in_quotes(spec.dtype));
    for (const int64_t extent : spec.shape) {
      if (extent < 0 || __builtin_mul_overflow(bits, extent, &bits)) {
        return refuse(spec.name, "shape " + io::shape_text(spec.shape) + " has no size in bytes");
      }
    }
    if (bits % 8 != 0) return refuse(spec.name, "expected a whole number of bytes");
    extents[i] = {end, bits / 8, 0};
    if (__builtin_add_overflow(end, bits / 8, &end)) return refuse(spec.name, "file too large");
  }
  return Status::success();
}

// The length and the JSON text, padded so that the data section is aligned.
Result<std::string> SafetensorsWriter::Impl::make_header(
    const std::map<std::string, std::string>& metadata) const {
  std::string text(8, '\0');
  text += '{';
  const auto not_utf8 = [this](const std::string& what) {
    return Status(ErrorCode::kInvalidArgument,
                  io::in_quotes(path) + ": expected UTF-8, got " + io::in_quotes(what));
  };
  if (!metadata.empty()) {
    text += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      const std::optional<std::string> key_text = json_string(key);
      const std::optional<std::string> value_text = json_string(value);
      if (!key_text || !value_text) return not_utf8(key);
      if (text.back() != '{') text += ',';
      text += *key_text + ':' + *value_text;
    }
    text += '}';
  }
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const std::optional<std::string> name = json_string(specs[i].name);
    if (!name) return not_utf8(specs[i].name);
    if (text.back() != '{') text += ',';
    text += *name + ":{\"dtype\":\"" + specs[i].dtype +
            "\",\"shape\":" + io::shape_text(specs[i].shape) + ",\"data_offsets\":[" +
            std::to_string(extents[i].offset) + ',' +
            std::to_string(extents[i].offset + extents[i].size_bytes) + "]}";
  }
  text += '}';
  text.resize(static_cast<std::size_t>(round_up(static_cast<int64_t>(text.size()), kDataAlignment)),
              ' ');
  const auto length = static_cast<int64_t>(text.size()) - 8;
  if (length > io::kMaxHeaderBytes) {
    return Status(ErrorCode::kInvalidArgument,
                  io::in_quotes(path) + ": header: expected at most " +
                      std::to_string(io::kMaxHeaderBytes) + " bytes, got " +
                      std::to_string(length));
  }
  for (std::size_t i = 0; i < 8; ++i)
    text[i] = static_cast<char>(length >> (8 * i) & 0xFF);
  return text;
}

Status SafetensorsWriter::Impl::open_partial() {
  // Renaming would put the file in the place of a device or a pipe.
  struct stat target {};
  if (::stat(path.c_str(), &target) == 0 && !S_ISREG(target.st_mode)) {
    return {ErrorCode::kIoError, io::in_quotes(path) + ": expected a regular file to replace"};
  }
  // O_NONBLOCK: opening a FIFO must fail, not wait for its reader.
  file = io::FileDescriptor(
      ::open(partial_path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666));
  if (!file) return io::system_error("cannot create", partial_path);
  // Its writer may have finished between open and lock: the file is then whole, under its own name.
  struct stat opened {};
  struct stat named {};
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0 || ::fstat(file.get(), &opened) != 0 ||
      ::stat(partial_path.c_str(), &named) != 0 || opened.st_ino != named.st_ino) {
    return {ErrorCode::kIoError, io::in_quotes(partial_path) + ": another process is writing it"};
  }
  created = true;
  if (::ftruncate(file.get(), 0) != 0) return io::system_error("cannot truncate", partial_path);
  int64_t bytes = data_offset();
  for (const Extent& extent : extents)
    bytes += extent.size_bytes;
  // Reserves the space, so that a full disk shows before any work. Not every file system can.
  if (::fallocate(file.get(), 0, 0, bytes) != 0 && errno != EOPNOTSUPP && errno != ENOSYS) {
    return io::system_error("cannot reserve " + std::to_string(bytes) + " bytes", partial_path);
  }
  return Status::success();
}

SafetensorsWriter::SafetensorsWriter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter::~SafetensorsWriter() = default;

Result<SafetensorsWriter> SafetensorsWriter::create(
    const std::string& path,
    const std::vector<TensorSpec>& tensors,
    const std::map<std::string, std::string>& metadata) {
  return io::without_bad_alloc([&]() -> Result<SafetensorsWriter> {
    auto impl = std::make_unique<Impl>();
    impl->path = path;
    impl->partial_path = path + ".partial";
    impl->specs = tensors;
    HX_RETURN_IF_ERROR(impl->place_tensors());
    Result<std::string> header = impl->make_header(metadata);
    if (!header.ok()) return header.status();
    impl->header = *std::move(header);
    HX_RETURN_IF_ERROR(impl->open_partial());
    return SafetensorsWriter(std::move(impl));
  });
}

Status SafetensorsWriter::write(std::string_view name,
                                const void* data,
                                int64_t bytes,
                                int64_t offset) {
  const auto found = impl_->index.find(name);
  if (found == impl_->index.end()) {
    return {ErrorCode::kNotFound,
            io::in_quotes(impl_->path) + ": tensor " + io::in_quotes(name) + " was not declared"};
  }
  Extent& extent = impl_->extents[found->second];
  if (bytes < 0 || offset < 0 || offset > extent.size_bytes || bytes > extent.size_bytes - offset) {
    return impl_->refuse(name,
                         "expected bytes inside its " + std::to_string(extent.size_bytes) +
                             ", got " + std::to_string(bytes) + " at " + std::to_string(offset));
  }
  if (bytes == 0) return Status::success();
  if (data == nullptr) return impl_->refuse(name, "data is null");
  HX_RETURN_IF_ERROR(write_all(impl_->file.get(),
                               impl_->partial_path,
                               data,
                               bytes,
                               impl_->data_offset() + extent.offset + offset));
  extent.written += bytes;
  return Status::success();
}

Status SafetensorsWriter::write(std::string_view name, const ConstTensorView& tensor) {
  const auto found = impl_->index.find(name);
  if (found != impl_->index.end()) {
    const TensorSpec& spec = impl_->specs[found->second];
    if (tensor.rank < 0 || tensor.rank > kMaxRank) {
      return impl_->refuse(
          name,
          "expected rank 0.." + std::to_string(kMaxRank) + ", got " + std::to_string(tensor.rank));
    }
    const std::vector<int64_t> shape(tensor.shape, tensor.shape + tensor.rank);
    if (!tensor.is_contiguous()) return impl_->refuse(name, "expected a packed tensor");
    if (spec.shape != shape || spec.dtype != safetensors_dtype(tensor.dtype)) {
      return impl_->refuse(name,
                           "expected " + io::shape_text(spec.shape) + " " + spec.dtype +
                               " as declared, got " + describe(tensor));
    }
  }
  return write(name, tensor.data, tensor.num_elements() * size_of(tensor.dtype));
}

Status SafetensorsWriter::finish() {
  for (std::size_t i = 0; i < impl_->specs.size(); ++i) {
    const Extent& extent = impl_->extents[i];
    if (extent.written != extent.size_bytes) {
      return impl_->refuse(impl_->specs[i].name,
                           "expected " + std::to_string(extent.size_bytes) +
                               " bytes to be written, got " + std::to_string(extent.written));
    }
  }
  HX_RETURN_IF_ERROR(write_all(
      impl_->file.get(), impl_->partial_path, impl_->header.data(), impl_->data_offset(), 0));
  if (::fsync(impl_->file.get()) != 0) return io::system_error("cannot flush", impl_->partial_path);
  if (::rename(impl_->partial_path.c_str(), impl_->path.c_str()) != 0) {
    return io::system_error("cannot rename from " + io::in_quotes(impl_->partial_path),
                            impl_->path);
  }
  impl_->created = false;
  return io::sync_directory(io::parent_directory(impl_->path));
}

}  // namespace hexpert
