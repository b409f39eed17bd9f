#include "io/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/io_support.hpp"

namespace hexpert::io {
void MappedFile::Unmap::operator()(const uint8_t* data) const {
  ::munmap(const_cast<uint8_t*>(data), static_cast<std::size_t>(size));
}

Result<MappedFile> MappedFile::open(const std::string& path) {
  // O_NONBLOCK: opening a FIFO must fail, not wait for its writer.
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) return system_error("cannot open", path);
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) return system_error("cannot stat", path);
  if (!S_ISREG(info.st_mode)) {
    return Status(ErrorCode::kIoError, in_quotes(path) + ": expected a regular file");
  }
  MappedFile mapped;
  mapped.size_ = info.st_size;
  mapped.modified_ns_ = info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec;
  if (mapped.size_ > 0) {
    const auto size = static_cast<std::size_t>(mapped.size_);
    void* data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.get(), 0);
    if (data == MAP_FAILED) return system_error("cannot map", path);
    mapped.data_ = std::unique_ptr<const uint8_t, Unmap>(static_cast<const uint8_t*>(data),
                                                         Unmap{mapped.size_});
  }
  return mapped;
}

void release_pages(const uint8_t* first, int64_t bytes) {
  if (bytes <= 0) return;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t before = reinterpret_cast<uintptr_t>(first) % page;  // on the first page
  // Advice: a refusal costs memory only.
  (void)::madvise(const_cast<uint8_t*>(first - before),
                  before + static_cast<std::size_t>(bytes),
                  MADV_DONTNEED);
}

}  // namespace hexpert::io
