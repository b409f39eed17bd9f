// Memory on large pages where the system gives them: weight streams are long and read once.
#pragma once

#include <cstdint>
#include <memory>

namespace hexpert {

class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  // Zeroed memory aligned to 64 bytes or more, with `kSlackBytes` readable past the end, so that
  // prefetching and full-width loads may run over. Empty (false) when the system has none.
  static AlignedBuffer zeroed(int64_t bytes);
  static constexpr int64_t kSlackBytes = 4096;

  uint8_t* data() { return data_.get(); }
  const uint8_t* data() const { return data_.get(); }
  int64_t size() const { return size_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  struct Unmap {
    int64_t mapped = 0;
    void operator()(uint8_t* data) const;
  };
  std::unique_ptr<uint8_t, Unmap> data_;
  int64_t size_ = 0;
};

}  // namespace hexpert
