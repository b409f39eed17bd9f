// Memory on large pages where the system gives them: weight streams are long and read once.
#pragma once

#include <cstdint>
#include <memory>

namespace hexpert {

struct UnmapPages {
  int64_t mapped_bytes = 0;
  void operator()(uint8_t* data) const;
};

class AlignedBuffer {
 public:
  // Readable past the end of every buffer, so that prefetches and full-width loads may run over.
  static constexpr int64_t kSlackBytes = 4096;

  AlignedBuffer() = default;
  // Zeroed memory, aligned to a page. Empty (false) when the system has none left.
  static AlignedBuffer zeroed(int64_t bytes);

  uint8_t* data() { return data_.get(); }
  const uint8_t* data() const { return data_.get(); }
  int64_t size() const { return size_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  std::unique_ptr<uint8_t, UnmapPages> data_;
  int64_t size_ = 0;
};

}  // namespace hexpert
