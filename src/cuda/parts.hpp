// Hands out consecutive parts of one allocation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hexpert/format.hpp"

namespace hexpert::cuda {

class Parts {
 public:
  // A null base only counts.
  explicit Parts(std::byte* base) : base_(base) {}
  template <typename T>
  T* take(int64_t count) {
    std::byte* part = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
    return reinterpret_cast<T*>(part);
  }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kAlignment = 256;
  std::byte* base_;
  int64_t used_ = 0;
};

}  // namespace hexpert::cuda
