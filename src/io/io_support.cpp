#include "io/io_support.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace hexpert::io {

std::string in_quotes(std::string_view name) {
  constexpr std::size_t kLongest = 160;
  constexpr char kHex[] = "0123456789abcdef";
  std::string text = "'";
  std::size_t length = name.size();
  if (length > kLongest) {
    length = kLongest;
    while (length > 0 && (static_cast<unsigned char>(name[length]) & 0xC0) == 0x80)
      --length;  // never in the middle of a UTF-8 sequence
  }
  for (const char c : name.substr(0, length)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      text += "\\x";
      text += kHex[byte >> 4];
      text += kHex[byte & 15];
    } else {
      text += c;
    }
  }
  if (length < name.size()) text += "...";
  return text + "'";
}

Status system_error(std::string_view what, const std::string& path) {
  const int error = errno;
  const bool missing = error == ENOENT || error == ENOTDIR;
  return {
      missing ? ErrorCode::kNotFound : ErrorCode::kIoError,
      in_quotes(path) + ": " + std::string(what) + ": " + std::generic_category().message(error)};
}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

int FileDescriptor::release() {
  return std::exchange(fd_, -1);
}

Status sync_directory(const std::string& path) {
  const FileDescriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory) return system_error("cannot open directory", path);
  // Some file systems cannot flush a directory and say EINVAL: the rename is then as durable as
  // they make it.
  if (::fsync(directory.get()) != 0 && errno != EINVAL) {
    return system_error("cannot flush directory", path);
  }
  return Status::success();
}

std::string parent_directory(const std::string& path) {
  const std::size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace hexpert::io
