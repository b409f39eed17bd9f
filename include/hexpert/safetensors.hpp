// Safetensors files: a memory-mapped reader and a writer that never leaves a half-written file.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hexpert/status.hpp"
#include "hexpert/tensor.hpp"

namespace hexpert {

/// One tensor of a safetensors file.
struct TensorInfo {
  std::string name;
  std::string dtype;           // as the file spells it: "BF16", "F8_E4M3", ...
  std::vector<int64_t> shape;  // outermost first; empty for a scalar
  int64_t offset = 0;          // bytes from the start of the data section
  int64_t size_bytes = 0;
};

/// The safetensors spelling of a dtype: "BF16".
std::string_view safetensors_dtype(DType dtype);
/// The inverse; none for a dtype that hexpert has no element type for.
std::optional<DType> dtype_from_safetensors(std::string_view name);

/// A tensor that owns its memory, aligned to 64 bytes.
class HostTensor {
 public:
  /// Uninitialized memory; kInvalidShape for a rank over kMaxRank, a negative extent or a size that
  /// overflows, kOutOfMemory.
  static Result<HostTensor> allocate(DType dtype, const std::vector<int64_t>& shape);

  const TensorView& view() const { return view_; }
  int64_t size_bytes() const { return size_bytes_; }
  template <typename T>
  T* as() {
    return view_.as<T>();
  }

 private:
  struct Free {
    void operator()(void* data) const;
  };
  std::unique_ptr<void, Free> data_;
  TensorView view_;
  int64_t size_bytes_ = 0;
};

/// A safetensors file, mapped read-only. Move-only; views stay valid while it lives. The file must
/// not be truncated meanwhile.
class SafetensorsFile {
 public:
  /// Maps a file and checks its header: every offset, shape and size, before any is used.
  ///
  /// @return the file; kNotFound, kIoError, kInvalidFile (message names file, tensor, requirement),
  ///         kOutOfMemory.
  static Result<SafetensorsFile> open(const std::string& path);

  const std::string& path() const;
  /// Sorted by name.
  const std::vector<TensorInfo>& tensors() const;
  /// The string pairs of `__metadata__`.
  const std::map<std::string, std::string>& metadata() const;
  int64_t file_bytes() const;
  /// Time of the last change, in nanoseconds since 1970.
  int64_t modified_ns() const;

  /// The entry of a tensor, or null.
  const TensorInfo* find(std::string_view name) const;
  /// First mapped byte of a tensor of this file. Any alignment.
  const uint8_t* data(const TensorInfo& tensor) const;
  /// A view of mapped memory.
  ///
  /// @return kNotFound; kInvalidDtype (no element type for it); kInvalidShape (rank over kMaxRank);
  ///         kMisaligned when the file does not align the tensor to its element size: use load().
  Result<ConstTensorView> tensor(std::string_view name) const;
  /// A copy in aligned memory, as forward() and quantize_tokens() want their inputs.
  ///
  /// @return kNotFound, kInvalidDtype, kInvalidShape, kOutOfMemory.
  Result<HostTensor> load(std::string_view name) const;
  /// Lets the system drop the pages of a mapped range, which are read again when touched.
  void release(const uint8_t* first, int64_t bytes) const;

  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();

 private:
  struct Impl;
  explicit SafetensorsFile(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// What a written file will hold.
struct TensorSpec {
  std::string name;
  std::string dtype;  // a safetensors spelling
  std::vector<int64_t> shape;
};

/// Writes one safetensors file of known layout: declare all tensors, write their bytes in any order
/// and in pieces, finish. The bytes go to `path` + ".partial", which finish() renames and the
/// destructor removes, so `path` is a whole file or does not exist. Move-only.
class SafetensorsWriter {
 public:
  /// @return the writer; kInvalidArgument (name twice, unknown dtype, negative extent), kNotFound,
  ///         kIoError (also when `path` is there and no regular file).
  static Result<SafetensorsWriter> create(const std::string& path,
                                          const std::vector<TensorSpec>& tensors,
                                          const std::map<std::string, std::string>& metadata = {});

  /// Writes `bytes` bytes of a tensor at byte `offset` of it. Each byte is to be written once.
  ///
  /// @return kNotFound, kInvalidArgument (past the end of the tensor), kIoError.
  Status write(std::string_view name, const void* data, int64_t bytes, int64_t offset = 0);
  /// Writes a whole packed tensor; its dtype and shape must be those declared.
  Status write(std::string_view name, const ConstTensorView& tensor);
  /// Flushes to the device and renames. kInvalidArgument names a tensor with bytes not written.
  Status finish();

  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;
  ~SafetensorsWriter();

 private:
  struct Impl;
  explicit SafetensorsWriter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace hexpert
