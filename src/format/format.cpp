#include "hexpert/format.hpp"

#include "format/layout.hpp"

namespace hexpert {

int64_t block_scale_bytes(ScaleLayout layout, int64_t rows, int64_t cols) {
  return layout::scale_bytes(layout, rows, cols / kBlockSize);
}

}  // namespace hexpert
