// What this machine can do at this moment, measured in short bursts between the samples of a
// benchmark: clocks, neighbours and (on shared machines) the AMX unit change while it runs.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "hexpert/status.hpp"
#include "weights/aligned_buffer.hpp"

namespace hexpert::tools {

// The arithmetic unit whose peak bounds a backend.
enum class ComputeUnit : uint8_t {
  kNone,  // scalar code: no useful bound
  kAvx2,  // vpmaddubsw + vpmaddwd + vpaddd, 256 bits
  kVnni,  // vpdpbusd, 512 bits
  kAmx,   // tdpbf16ps, 2 x 2 tiles with operands from the L1 cache
};
std::string_view to_string(ComputeUnit unit);
ComputeUnit compute_unit_of(std::string_view backend);

class Ceilings {
 public:
  // Allocates and fills the buffer that is read, larger than any cache, and picks the fastest way
  // to read it: load width and software prefetch. kOutOfMemory.
  static Result<Ceilings> create(int num_threads);

  // Reads the next 256 MiB of the buffer. GB/s of all threads together; the data come from DRAM,
  // as the slices rotate over more than 1 GB.
  double read_gbs();
  // Operations a second of all threads in units of 1e9, a multiply-add counts two; 0 for kNone and
  // for a unit that this machine lacks. Runs for a few milliseconds.
  double compute_gops(ComputeUnit unit) const;

  std::string_view read_variant() const;
  int num_threads() const { return num_threads_; }

 private:
  Ceilings(int num_threads, AlignedBuffer buffer)
      : num_threads_(num_threads), buffer_(std::move(buffer)) {}
  double read_slice(size_t variant);

  int num_threads_;
  AlignedBuffer buffer_;
  int64_t next_slice_ = 0;
  size_t variant_ = 0;
};

}  // namespace hexpert::tools
