// A file mapped read-only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "hexpert/status.hpp"

namespace hexpert::io {

class MappedFile {
 public:
  MappedFile() : data_(nullptr, Unmap{}) {}
  // kNotFound, or kIoError for anything that is not a readable regular file.
  static Result<MappedFile> open(const std::string& path);

  const uint8_t* data() const { return data_.get(); }  // null for an empty file
  int64_t size() const { return size_; }
  int64_t modified_ns() const { return modified_ns_; }

 private:
  struct Unmap {
    int64_t size;
    void operator()(const uint8_t* data) const;
  };
  std::unique_ptr<const uint8_t, Unmap> data_;
  int64_t size_ = 0;
  int64_t modified_ns_ = 0;
};

// Gives the pages of a mapped range back; they are read again when touched.
void release_pages(const uint8_t* first, int64_t bytes);

}  // namespace hexpert::io
