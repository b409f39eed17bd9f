// Judges the output of a backend by that of the reference. docs/numerics.md, end to end.
#pragma once

#include <cstdint>
#include <string>

#include "hexpert/tensor.hpp"

namespace hexpert::tools {

struct Agreement {
  int64_t elements = 0;
  int64_t equal = 0;        // same bits
  int64_t largest_ulp = 0;  // largest distance in representable values of the dtype
  double relative_l2 = 0;   // of the whole
  double worst_row_l2 = 0;  // of one row
  int64_t worst_row = -1;
  int64_t rows = 0;             // with a reference that is not zero
  int64_t rows_within = 0;      // of these, within kRowL2
  int64_t wrong_zero_rows = 0;  // zero in the reference, not here
  int64_t nan_mismatches = 0;   // NaN or infinity on one side only

  static constexpr double kRowL2 = 4e-3;     // 95 % of the rows, or all but one below 20 rows
  static constexpr double kWorstRow = 0.12;  // every row
  static constexpr double kWhole = 1e-2;     // 64 rows or more together
  bool ok() const;
  double equal_share() const;
  // "relative L2 1.2e-07, worst row 3.1e-07 (row 5), 99.98 % equal, largest difference 1 ulp"
  std::string describe() const;
};
// Both [rows, cols], bf16 or f32, the same dtype, packed.
Agreement compare(const ConstTensorView& reference, const ConstTensorView& candidate);

}  // namespace hexpert::tools
