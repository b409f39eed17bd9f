// Small things that every file of src/io needs.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/without_bad_alloc.hpp"
#include "hexpert/status.hpp"

namespace hexpert::io {

// A name from a file in quotes, fit for a message and a terminal: control characters escaped, long
// names cut.
std::string in_quotes(std::string_view name);

// "[16, 104, 88]".
template <typename Extents>
std::string shape_text(const Extents& shape) {
  std::string text = "[";
  for (const auto extent : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(extent);
  }
  return text + "]";
}

// The Status of a failed system call, from errno: kNotFound for a missing path, else kIoError.
Status system_error(std::string_view what, const std::string& path);

using hexpert::without_bad_alloc;

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int release();
  int fd_;
};

// Flushes a directory, so that a rename in it survives a power failure.
Status sync_directory(const std::string& path);
// The directory that holds `path`, or ".".
std::string parent_directory(const std::string& path);

}  // namespace hexpert::io
