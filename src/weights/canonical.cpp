// Canonical import and export: the interchange arrangement of docs/format.md section 5.
#include <cmath>
#include <cstring>

#include "core/overlap.hpp"
#include "core/without_bad_alloc.hpp"
#include "fmt/format.h"
#include "weights/storage.hpp"
#include "weights/tile_groups.hpp"

namespace hexpert {
namespace {

// One canonical matrix and the tiles it corresponds to.
struct Matrix {
  const char* name;
  int64_t rows;        // canonical, padded to 256 (twice that for gated FC1)
  int64_t cols;        // canonical K, padded to 256
  int64_t tile_k;      // K in the tiles
  int64_t valid_cols;  // K of the checkpoint
};

Matrix fc1_matrix(const ExpertWeights::Storage& s) {
  return {"fc1",
          s.shape.canonical_fc1_rows(),
          s.shape.padded_hidden_size(),
          s.hidden,
          s.shape.hidden_size};
}

Matrix fc2_matrix(const ExpertWeights::Storage& s) {
  return {"fc2",
          s.shape.padded_hidden_size(),
          s.shape.padded_intermediate_size(),
          s.intermediate,
          s.shape.intermediate_size};
}

// Where a canonical row lies: its projection, and the row there (-1: padding).
struct RowPlace {
  bool gate = false;
  int64_t row = -1;
};

RowPlace fc1_place(const ExpertShape& shape, int64_t canonical_row) {
  if (!shape.gated) return {false, canonical_row < shape.intermediate_size ? canonical_row : -1};
  constexpr int64_t kGroup = layout::kCanonicalInterleave;
  const bool gate = canonical_row / kGroup % 2 == 1;
  const int64_t feature = canonical_row / (2 * kGroup) * kGroup + canonical_row % kGroup;
  return {gate, feature < shape.intermediate_size ? feature : -1};
}

RowPlace fc2_place(const ExpertShape& shape, int64_t canonical_row) {
  return {false, canonical_row < shape.hidden_size ? canonical_row : -1};
}

// A padding row or column of a matrix whose alpha is NaN is poisoned with it.
uint8_t padding_scale(float alpha) {
  return std::isnan(alpha) ? kE4M3Nan : kZeroScale;
}

void export_matrix(const Matrix& m,
                   const auto& place_of,
                   const auto& group_of,
                   const auto& alpha_of,
                   uint8_t* data,
                   uint8_t* scales) {
  const int64_t columns = m.cols / kBlockSize;
  std::vector<uint8_t> row_codes(static_cast<size_t>(m.cols / 2));
  std::vector<uint8_t> row_scales(static_cast<size_t>(columns));
  for (int64_t r = 0; r < m.rows; ++r) {
    const RowPlace place = place_of(r);
    std::fill(row_codes.begin(), row_codes.end(), uint8_t{0});
    std::fill(row_scales.begin(), row_scales.end(), padding_scale(alpha_of(place.gate)));
    if (place.row >= 0) {
      read_row(group_of(place),
               place.row % tiles::kGroupRows,
               m.tile_k,
               row_codes.data(),
               row_scales.data());
    }
    if (data != nullptr) std::memcpy(data + r * (m.cols / 2), row_codes.data(), row_codes.size());
    if (scales != nullptr) {
      for (int64_t c = 0; c < columns; ++c) {
        scales[layout::offset_128x4(r, c, columns)] = row_scales[static_cast<size_t>(c)];
      }
    }
  }
}

Status padding_error(const Matrix& m, int64_t expert, int64_t row, int64_t col) {
  return {ErrorCode::kInvalidArgument,
          fmt::format(
              "{}: expert {}: padding at row {}, column {} is not zero", m.name, expert, row, col)};
}

// Block scales are finite and not negative, but in a poisoned matrix. Padding must be zero, for it
// takes part in the products; nothing is kept of it.
Status check_matrix(const Matrix& m,
                    int64_t expert,
                    const auto& place_of,
                    const auto& alpha_of,
                    const uint8_t* data,
                    const uint8_t* scales) {
  const int64_t columns = m.cols / kBlockSize;
  for (int64_t r = 0; r < m.rows; ++r) {
    const RowPlace place = place_of(r);
    const int64_t first_pad = place.row < 0 ? 0 : m.valid_cols;
    const uint8_t* row = data + r * (m.cols / 2);
    for (int64_t k = first_pad; k < m.cols; ++k) {
      if ((row[k / 2] >> (k % 2 * 4) & 15) != 0) return padding_error(m, expert, r, k);
    }
    const uint8_t expected = padding_scale(alpha_of(place.gate));
    for (int64_t c = 0; c < columns; ++c) {
      const uint8_t scale = scales[layout::offset_128x4(r, c, columns)];
      if (scale >= kE4M3Nan && scale != expected) {
        return {ErrorCode::kNonFiniteWeights,
                fmt::format("{}: expert {}, row {}, block {}: block scale 0x{:02X} is {}",
                            m.name,
                            expert,
                            r,
                            c,
                            scale,
                            (scale & 0x7F) == kE4M3Nan ? "NaN" : "negative")};
      }
    }
    for (int64_t c = round_up(first_pad, kBlockSize) / kBlockSize; c < columns; ++c) {
      if (scales[layout::offset_128x4(r, c, columns)] != expected) {
        return padding_error(m, expert, r, c * kBlockSize);
      }
    }
  }
  return {};
}

void import_matrix(const Matrix& m,
                   int64_t groups,
                   const auto& canonical_row_of,
                   const uint8_t* data,
                   const uint8_t* scales,
                   uint8_t* out) {
  const int64_t columns = m.cols / kBlockSize;
  const int64_t tile_columns = m.tile_k / kBlockSize;
  std::vector<uint8_t> row_scales(static_cast<size_t>(tile_columns));
  GroupBuilder builder(m.tile_k);
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t n = 0; n < tiles::kGroupRows; ++n) {
      const int64_t r = canonical_row_of(group, n);
      for (int64_t c = 0; c < tile_columns; ++c) {
        row_scales[static_cast<size_t>(c)] = scales[layout::offset_128x4(r, c, columns)];
      }
      builder.copy(n, data + r * (m.cols / 2), row_scales.data(), m.tile_k);
    }
    builder.store(out + group * tiles::group_bytes(m.tile_k));
  }
}

// NaN stands for a poisoned matrix; infinity has no meaning.
Status check_alphas(const float* alphas, int64_t experts, const char* name) {
  for (int64_t e = 0; e < experts; ++e) {
    if (std::isinf(alphas[e])) {
      return {ErrorCode::kNonFiniteWeights,
              fmt::format("{}: expert {} has {}, expected a finite number", name, e, alphas[e])};
    }
  }
  return {};
}

Status require(const void* pointer, const char* name) {
  if (pointer != nullptr) return {};
  return {ErrorCode::kNullPointer, fmt::format("{}: must not be null", name)};
}

// What export_canonical() writes; members that are null are nowhere.
Status check_apart(const CanonicalWeights& out, const ExpertShape& shape) {
  const int64_t experts = shape.num_local_experts;
  const int64_t alphas = experts * static_cast<int64_t>(sizeof(float));
  const int64_t fc1 = experts * shape.canonical_fc1_rows() * shape.padded_hidden_size();
  const int64_t fc2 = experts * shape.padded_hidden_size() * shape.padded_intermediate_size();
  const MemoryRange outputs[] = {{"fc1_data", out.fc1_data, fc1 / 2},
                                 {"fc1_scale_swizzled", out.fc1_scale_swizzled, fc1 / kBlockSize},
                                 {"fc1_alpha", out.fc1_alpha, alphas},
                                 {"fc1_gate_alpha", out.fc1_gate_alpha, alphas},
                                 {"fc2_data", out.fc2_data, fc2 / 2},
                                 {"fc2_scale_swizzled", out.fc2_scale_swizzled, fc2 / kBlockSize},
                                 {"fc2_alpha", out.fc2_alpha, alphas}};
  return check_outputs_apart(outputs);
}

// The part of expert `e`.
CanonicalWeights expert_part(const CanonicalWeights& all, const ExpertShape& shape, int64_t e) {
  const int64_t hidden = shape.padded_hidden_size();
  const int64_t fc1 = shape.canonical_fc1_rows() * hidden;
  const int64_t fc2 = hidden * shape.padded_intermediate_size();
  const auto advance = [e](auto* p, int64_t count) { return p == nullptr ? p : p + e * count; };
  return {.fc1_data = advance(all.fc1_data, fc1 / 2),
          .fc1_scale_swizzled = advance(all.fc1_scale_swizzled, fc1 / kBlockSize),
          .fc1_alpha = advance(all.fc1_alpha, 1),
          .fc1_gate_alpha = advance(all.fc1_gate_alpha, 1),
          .fc2_data = advance(all.fc2_data, fc2 / 2),
          .fc2_scale_swizzled = advance(all.fc2_scale_swizzled, fc2 / kBlockSize),
          .fc2_alpha = advance(all.fc2_alpha, 1)};
}

// Expert `index` of the tiles.
void export_expert(const ExpertWeights::Storage& s, int64_t index, const CanonicalWeights& out) {
  const auto i = static_cast<size_t>(index);
  const Matrix m1 = fc1_matrix(s);
  const Matrix m2 = fc2_matrix(s);
  if (out.fc1_data != nullptr || out.fc1_scale_swizzled != nullptr) {
    export_matrix(
        m1,
        [&](int64_t r) { return fc1_place(s.shape, r); },
        [&](const RowPlace& p) {
          return s.fc1_expert(index) +
                 fc1_group_of(s.shape, p.gate, p.row) * tiles::group_bytes(m1.tile_k);
        },
        [&](bool gate) { return gate ? s.fc1_gate_alpha[i] : s.fc1_up_alpha[i]; },
        out.fc1_data,
        out.fc1_scale_swizzled);
  }
  if (out.fc2_data != nullptr || out.fc2_scale_swizzled != nullptr) {
    export_matrix(
        m2,
        [&](int64_t r) { return fc2_place(s.shape, r); },
        [&](const RowPlace& p) {
          return s.fc2_expert(index) + p.row / tiles::kGroupRows * tiles::group_bytes(m2.tile_k);
        },
        [&](bool) { return s.fc2_alpha[i]; },
        out.fc2_data,
        out.fc2_scale_swizzled);
  }
  if (out.fc1_alpha != nullptr) *out.fc1_alpha = s.fc1_up_alpha[i];
  if (out.fc1_gate_alpha != nullptr) *out.fc1_gate_alpha = s.fc1_gate_alpha[i];
  if (out.fc2_alpha != nullptr) *out.fc2_alpha = s.fc2_alpha[i];
}

Status check_canonical_expert(const ExpertWeights::Storage& s,
                              int64_t expert,
                              const CanonicalWeights& source) {
  HX_RETURN_IF_ERROR(check_matrix(
      fc1_matrix(s),
      expert,
      [&](int64_t r) { return fc1_place(s.shape, r); },
      [&](bool gate) { return gate ? *source.fc1_gate_alpha : *source.fc1_alpha; },
      source.fc1_data,
      source.fc1_scale_swizzled));
  return check_matrix(
      fc2_matrix(s),
      expert,
      [&](int64_t r) { return fc2_place(s.shape, r); },
      [&](bool) { return *source.fc2_alpha; },
      source.fc2_data,
      source.fc2_scale_swizzled);
}

// Into expert `index` of the tiles.
void import_expert(ExpertWeights::Storage& s, int64_t index, const CanonicalWeights& source) {
  import_matrix(
      fc1_matrix(s),
      s.fc1_rows / tiles::kGroupRows,
      [&](int64_t group, int64_t n) {
        const GroupSource g = fc1_group_source(s.shape, group);
        if (!s.shape.gated) return g.first_row + n;
        return layout::gated_row(g.gate, g.first_row + n, layout::kCanonicalInterleave);
      },
      source.fc1_data,
      source.fc1_scale_swizzled,
      s.fc1_expert(index));
  import_matrix(
      fc2_matrix(s),
      s.hidden / tiles::kGroupRows,
      [](int64_t group, int64_t n) { return group * tiles::kGroupRows + n; },
      source.fc2_data,
      source.fc2_scale_swizzled,
      s.fc2_expert(index));
  const auto i = static_cast<size_t>(index);
  s.fc1_up_alpha[i] = *source.fc1_alpha;
  s.fc1_gate_alpha[i] = *source.fc1_gate_alpha;
  s.fc2_alpha[i] = *source.fc2_alpha;
}

// One alpha for up and gate rows of every expert, bit for bit.
Status check_alphas_agree(const std::vector<float>& up, const std::vector<float>& gate) {
  for (size_t e = 0; e < up.size(); ++e) {
    if (std::bit_cast<uint32_t>(up[e]) == std::bit_cast<uint32_t>(gate[e])) continue;
    return {ErrorCode::kUnsupported,
            fmt::format("fc1_gate_alpha: expert {} has alpha {} for up and {} for gate rows, so "
                        "fc1_alpha alone cannot hold both",
                        e,
                        up[e],
                        gate[e])};
  }
  return {};
}

}  // namespace

Status ExpertWeights::export_canonical(const CanonicalWeights& out) const {
  return without_bad_alloc([&]() -> Status {
    const Storage& s = *storage_;
    HX_RETURN_IF_ERROR(check_apart(out, s.shape));
    const bool one_fc1_alpha =
        s.shape.gated && out.fc1_alpha != nullptr && out.fc1_gate_alpha == nullptr;
    if (!s.on_device) {
      if (one_fc1_alpha) HX_RETURN_IF_ERROR(check_alphas_agree(s.fc1_up_alpha, s.fc1_gate_alpha));
      for (int64_t e = 0; e < s.shape.num_local_experts; ++e)
        export_expert(s, e, expert_part(out, s.shape, e));
      return {};
    }
    if (one_fc1_alpha) {
      const auto experts = static_cast<size_t>(s.shape.num_local_experts);
      std::vector<float> up(experts), gate(experts), down(experts);
      HX_RETURN_IF_ERROR(s.on_device->read_alphas(up.data(), gate.data(), down.data()));
      HX_RETURN_IF_ERROR(check_alphas_agree(up, gate));
    }
    const std::unique_ptr<Storage> one = tiles_of_one_expert(s);
    for (int64_t e = 0; e < s.shape.num_local_experts; ++e) {
      HX_RETURN_IF_ERROR(s.on_device->read_expert(e, *one));
      export_expert(*one, 0, expert_part(out, s.shape, e));
    }
    return {};
  });
}

Status ExpertWeights::import_canonical(const CanonicalWeights& given) {
  return without_bad_alloc([&]() -> Status {
    HX_RETURN_IF_ERROR(require(given.fc1_data, "fc1_data"));
    HX_RETURN_IF_ERROR(require(given.fc1_scale_swizzled, "fc1_scale_swizzled"));
    HX_RETURN_IF_ERROR(require(given.fc1_alpha, "fc1_alpha"));
    HX_RETURN_IF_ERROR(require(given.fc2_data, "fc2_data"));
    HX_RETURN_IF_ERROR(require(given.fc2_scale_swizzled, "fc2_scale_swizzled"));
    HX_RETURN_IF_ERROR(require(given.fc2_alpha, "fc2_alpha"));
    CanonicalWeights source = given;
    if (source.fc1_gate_alpha == nullptr) source.fc1_gate_alpha = source.fc1_alpha;
    Storage& s = *storage_;
    const int64_t experts = s.shape.num_local_experts;
    HX_RETURN_IF_ERROR(check_alphas(source.fc1_alpha, experts, "fc1_alpha"));
    HX_RETURN_IF_ERROR(check_alphas(source.fc1_gate_alpha, experts, "fc1_gate_alpha"));
    HX_RETURN_IF_ERROR(check_alphas(source.fc2_alpha, experts, "fc2_alpha"));
    for (int64_t e = 0; e < experts; ++e)
      HX_RETURN_IF_ERROR(check_canonical_expert(s, e, expert_part(source, s.shape, e)));
    if (!s.on_device) {
      for (int64_t e = 0; e < s.shape.num_local_experts; ++e)
        import_expert(s, e, expert_part(source, s.shape, e));
      return {};
    }
    const std::unique_ptr<Storage> one = tiles_of_one_expert(s);
    for (int64_t e = 0; e < s.shape.num_local_experts; ++e) {
      import_expert(*one, 0, expert_part(source, s.shape, e));
      HX_RETURN_IF_ERROR(s.on_device->write_expert(e, *one));
    }
    return {};
  });
}

Status ExpertWeights::export_projection(int64_t expert,
                                        Projection projection,
                                        uint8_t* codes,
                                        uint8_t* block_scales,
                                        float* alpha) const {
  return without_bad_alloc([&]() -> Status {
    HX_RETURN_IF_ERROR(check_expert(expert));
    if (projection == Projection::kGate && !shape().gated) {
      return {ErrorCode::kInvalidArgument, "projection: these weights have no gate"};
    }
    HX_RETURN_IF_ERROR(require(codes, "codes"));
    HX_RETURN_IF_ERROR(require(block_scales, "block_scales"));
    const bool down = projection == Projection::kDown;
    const bool gate = projection == Projection::kGate;
    const int64_t rows = down ? shape().hidden_size : shape().intermediate_size;
    const int64_t cols = down ? shape().intermediate_size : shape().hidden_size;
    const int64_t blocks = (cols + kBlockSize - 1) / kBlockSize;
    const MemoryRange outputs[] = {{"codes", codes, rows * blocks * 8},
                                   {"block_scales", block_scales, rows * blocks},
                                   {"alpha", alpha, sizeof(float)}};
    HX_RETURN_IF_ERROR(check_outputs_apart(outputs));
    std::unique_ptr<Storage> one;
    if (storage_->on_device) {
      one = tiles_of_one_expert(*storage_);
      HX_RETURN_IF_ERROR(storage_->on_device->read_expert(expert, *one));
    }
    const Storage& s = one ? *one : *storage_;
    const int64_t index = one ? 0 : expert;
    const Matrix m = down ? fc2_matrix(s) : fc1_matrix(s);
    std::vector<uint8_t> row_codes(static_cast<size_t>(m.tile_k / 2));
    std::vector<uint8_t> row_scales(static_cast<size_t>(m.tile_k / kBlockSize));
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t group = down ? r / tiles::kGroupRows : fc1_group_of(s.shape, gate, r);
      const uint8_t* matrix = down ? s.fc2_expert(index) : s.fc1_expert(index);
      read_row(matrix + group * tiles::group_bytes(m.tile_k),
               r % tiles::kGroupRows,
               m.tile_k,
               row_codes.data(),
               row_scales.data());
      std::memcpy(codes + r * blocks * 8, row_codes.data(), static_cast<size_t>(blocks * 8));
      std::memcpy(block_scales + r * blocks, row_scales.data(), static_cast<size_t>(blocks));
    }
    if (alpha != nullptr) {
      const auto i = static_cast<size_t>(index);
      *alpha = down ? s.fc2_alpha[i] : gate ? s.fc1_gate_alpha[i] : s.fc1_up_alpha[i];
    }
    return {};
  });
}

}  // namespace hexpert
