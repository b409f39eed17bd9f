#include "weights/quantize_experts.hpp"

#include <omp.h>

#include <algorithm>
#include <array>
#include <vector>

#include "core/threads.hpp"
#include "cpu/float_environment.hpp"
#include "weights/tile_groups.hpp"

namespace hexpert {
namespace {

// The two matrices of an expert.
constexpr size_t kFc1 = 0;
constexpr size_t kFc2 = 1;
using AmaxBits = std::array<uint16_t, 2>;

// Rows of the BF16 matrices and the groups that they go to.
class ExpertRows {
 public:
  ExpertRows(const ExpertWeights::Storage& s, size_t matrix)
      : shape_(s.shape),
        fc1_(matrix == kFc1),
        cols_(fc1_ ? shape_.hidden_size : shape_.intermediate_size),
        rows_(fc1_ ? shape_.intermediate_size * (shape_.gated ? 2 : 1) : shape_.hidden_size),
        tile_k_(fc1_ ? s.hidden : s.intermediate),
        groups_((fc1_ ? s.fc1_rows : s.hidden) / tiles::kGroupRows) {}

  int64_t cols() const { return cols_; }
  int64_t elements() const { return rows_ * cols_; }
  int64_t tile_k() const { return tile_k_; }
  // Groups of part `i` of `parts`.
  int64_t first_group(int64_t i, int64_t parts) const { return groups_ * i / parts; }

  // Element where row n of a group starts, or -1 for a row of zeros.
  int64_t start(int64_t group, int64_t n) const {
    if (!fc1_) {
      const int64_t row = group * tiles::kGroupRows + n;
      return row < rows_ ? row * cols_ : -1;
    }
    const GroupSource source = fc1_group_source(shape_, group);
    const int64_t row = source.first_row + n;
    if (row >= shape_.intermediate_size) return -1;
    // The stack has gate rows first, then up rows.
    return (shape_.gated && !source.gate ? shape_.intermediate_size + row : row) * cols_;
  }

 private:
  const ExpertShape& shape_;
  bool fc1_;
  int64_t cols_;
  int64_t rows_;
  int64_t tile_k_;
  int64_t groups_;
};

// One thread's part of the work: the same groups of every expert.
class Part {
 public:
  Part(const ExpertWeights::Storage& s, const std::array<ExpertRows, 2>& rows)
      : rows_(rows), builders_{GroupBuilder(s.hidden), GroupBuilder(s.intermediate)} {}

  void assign(int64_t index, int64_t parts) {
    index_ = index;
    parts_ = parts;
  }

  uint16_t amax(size_t matrix, const uint16_t* x) const {
    const ExpertRows& rows = rows_[matrix];
    uint16_t amax = 0;
    for (int64_t group = begin(rows); group < end(rows); ++group) {
      for (int64_t n = 0; n < tiles::kGroupRows; ++n) {
        if (const int64_t start = rows.start(group, n); start >= 0) {
          amax = std::max(amax, kernels_.amax_bits(x + start, rows.cols()));
        }
      }
    }
    return amax;
  }

  // Returns the maximum of `following`, the same matrix of the next expert (null after the last):
  // it comes from memory while this one, which is in a cache since its own maximum was taken, is
  // quantized.
  uint16_t quantize(size_t matrix,
                    const uint16_t* x,
                    const OuterScale& outer,
                    const uint16_t* following,
                    uint8_t* out) {
    const ExpertRows& rows = rows_[matrix];
    GroupBuilder& builder = builders_[matrix];
    uint16_t amax = 0;
    for (int64_t group = begin(rows); group < end(rows); ++group) {
      for (int64_t n = 0; n < tiles::kGroupRows; ++n) {
        const int64_t start = rows.start(group, n);
        if (start < 0) {
          builder.pad(n, 0, outer.poisoned ? kE4M3Nan : kZeroScale);
          continue;
        }
        // The row after the one that is read below.
        const uint16_t* ahead = (following != nullptr ? following : x) + start + rows.cols();
        builder.quantize(n, x + start, rows.cols(), outer, ahead);
        if (following != nullptr)
          amax = std::max(amax, kernels_.amax_bits(following + start, rows.cols()));
      }
      builder.store(out + group * tiles::group_bytes(rows.tile_k()));
    }
    return amax;
  }

 private:
  int64_t begin(const ExpertRows& rows) const { return rows.first_group(index_, parts_); }
  int64_t end(const ExpertRows& rows) const { return rows.first_group(index_ + 1, parts_); }

  const cpu::Kernels& kernels_ = cpu::best_kernels();
  const std::array<ExpertRows, 2>& rows_;
  std::array<GroupBuilder, 2> builders_;
  int64_t index_ = 0;
  int64_t parts_ = 1;
};

AmaxBits maximum(const std::vector<AmaxBits>& parts) {
  AmaxBits all{};
  for (const AmaxBits& part : parts) {
    for (size_t matrix : {kFc1, kFc2})
      all[matrix] = std::max(all[matrix], part[matrix]);
  }
  return all;
}

}  // namespace

void quantize_experts(ExpertWeights::Storage& s,
                      int64_t first,
                      int64_t count,
                      const uint16_t* fc1,
                      const uint16_t* fc2) {
  const std::array<ExpertRows, 2> rows{ExpertRows(s, kFc1), ExpertRows(s, kFc2)};
  const int threads = threads_or_default(s.num_threads);
  // Made before the region: an exception must not leave it. Maxima of an expert are read while
  // those of the next one are written.
  std::vector<Part> parts;
  parts.reserve(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i)
    parts.emplace_back(s, rows);
  std::array<std::vector<AmaxBits>, 2> maxima;
  maxima.fill(std::vector<AmaxBits>(static_cast<size_t>(threads)));

#pragma omp parallel num_threads(threads)
  {
    const cpu::FloatEnvironment environment;
    const auto thread = static_cast<size_t>(omp_get_thread_num());
    Part& part = parts[thread];
    part.assign(omp_get_thread_num(), omp_get_num_threads());
    maxima[0][thread] = {part.amax(kFc1, fc1), part.amax(kFc2, fc2)};
    for (int64_t i = 0; i < count; ++i) {
#pragma omp barrier
      const AmaxBits amax = maximum(maxima[static_cast<size_t>(i % 2)]);
      const OuterScale fc1_outer = matrix_scale(amax[kFc1]);
      const OuterScale fc2_outer = matrix_scale(amax[kFc2]);
      const uint16_t* fc1_x = fc1 + i * rows[kFc1].elements();
      const uint16_t* fc2_x = fc2 + i * rows[kFc2].elements();
      const bool more = i + 1 < count;
      const uint16_t* fc1_next = more ? fc1_x + rows[kFc1].elements() : nullptr;
      const uint16_t* fc2_next = more ? fc2_x + rows[kFc2].elements() : nullptr;
      maxima[static_cast<size_t>((i + 1) % 2)][thread] = {
          part.quantize(kFc1, fc1_x, fc1_outer, fc1_next, s.fc1_expert(first + i)),
          part.quantize(kFc2, fc2_x, fc2_outer, fc2_next, s.fc2_expert(first + i))};
      if (thread == 0) {
        const auto expert = static_cast<size_t>(first + i);
        s.fc1_up_alpha[expert] = fc1_outer.stored;
        s.fc1_gate_alpha[expert] = fc1_outer.stored;
        s.fc2_alpha[expert] = fc2_outer.stored;
      }
    }
  }
}

}  // namespace hexpert
