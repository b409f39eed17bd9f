#include "weights/aligned_buffer.hpp"

#include <sys/mman.h>

#include "hexpert/format.hpp"

namespace hexpert {
namespace {
constexpr int64_t kHugePage = int64_t{2} << 20;
}

AlignedBuffer AlignedBuffer::zeroed(int64_t bytes) {
  AlignedBuffer buffer;
  if (bytes < 0 || bytes > (int64_t{1} << 46)) return buffer;
  int64_t mapped = round_up(bytes + kSlackBytes, 4096);
  // A mapping of whole huge pages, so that the kernel can use them from its first byte on.
  const bool huge = mapped >= 2 * kHugePage;
  if (huge) mapped = round_up(mapped, kHugePage) + kHugePage;
  void* address = mmap(nullptr,
                       static_cast<size_t>(mapped),
                       PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS,
                       -1,
                       0);
  if (address == MAP_FAILED) return buffer;
  auto* data = static_cast<uint8_t*>(address);
  if (huge) {
    const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % kHugePage);
    const int64_t head = misaligned == 0 ? 0 : kHugePage - misaligned;
    if (head > 0) munmap(data, static_cast<size_t>(head));
    if (head < kHugePage) {
      munmap(data + mapped - (kHugePage - head), static_cast<size_t>(kHugePage - head));
    }
    data += head;
    mapped -= kHugePage;
    // A hint: without huge pages everything works, slower.
    madvise(data, static_cast<size_t>(mapped), MADV_HUGEPAGE);
  }
  buffer.data_ = std::unique_ptr<uint8_t, UnmapPages>(data, UnmapPages{mapped});
  buffer.size_ = bytes;
  return buffer;
}

void UnmapPages::operator()(uint8_t* data) const {
  munmap(data, static_cast<size_t>(mapped_bytes));
}

}  // namespace hexpert
