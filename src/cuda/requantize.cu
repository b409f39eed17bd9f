#include "cuda/activation.cuh"
#include "cuda/ptx.cuh"
#include "cuda/quantize_rows.cuh"
#include "cuda/requantize.hpp"
#include "format/layout.hpp"
#include "moe/activation.hpp"

namespace hexpert::cuda {
namespace {

namespace fragments = layout::sm90_fragments;

template <int kWarps>
__device__ __forceinline__ int64_t route_of_thread(const Requantize& args) {
  const int64_t row = row_of_thread<kWarps>(blockIdx.x);
  return row < *args.num_routes ? row : -1;
}
struct InPlace {
  const __device__ int32_t* operator()() const { return nullptr; }
};

template <int kWarps>
__global__ void __launch_bounds__(kQuantizeThreads<kWarps>)
    requantize_kernel(const Requantize args, const QuantizedRows out) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t row = route_of_thread<kWarps>(args);
  quantize_row<kWarps, true>(
      row,
      out,
      [&](int half) {
        const auto v = reinterpret_cast<const uint4*>(args.rows + row * args.cols)[half];
        return HalfBlock{v.x, v.y, v.z, v.w};
      },
      InPlace{});
}

struct Sums {
  float4 low;   // four consecutive rows
  float4 high;  // and those 8 rows on
};

__device__ __forceinline__ float4 add(float4 a, float4 b) {
  return {__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w)};
}

// Sums from several fragment rows on, the splits added in ascending order. Split after split, so that the
// loads of a split are under way together. Negative rows are skipped.
template <int kCount>
__device__ __forceinline__ void add_splits(const Requantize& args,
                                           int64_t row,
                                           const int (&fragment_rows)[kCount],
                                           Sums (&sums)[kCount]) {
  const int64_t stride = args.max_routes * args.partial.fc1_rows;
  const float* from = args.partial.sums + row * args.partial.fc1_rows;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    sums[i] = {};
  for (int s = 0; s < args.partial.splits; ++s, from += stride) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (fragment_rows[i] < 0) continue;
      const float4 low = *reinterpret_cast<const float4*>(from + fragment_rows[i]);
      const float4 high = *reinterpret_cast<const float4*>(from + fragment_rows[i] + 8);
      sums[i] = s == 0 ? Sums{low, high} : Sums{add(sums[i].low, low), add(sums[i].high, high)};
    }
  }
}

// Out of line: it is long and rarely used.
__device__ __noinline__ float activate_otherwise(const Activation& activation,
                                                 float up,
                                                 float gate) {
  return static_cast<float>(activate(activation, up, gate));
}

enum class Activated : uint8_t { kSquaredRelu, kSwiGlu, kOther };

template <int kWarps, Activated kKind>
__global__ void __launch_bounds__(kQuantizeThreads<kWarps>)
    activate_and_requantize_kernel(const Requantize args, const QuantizedRows out) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const Requantize::Partial& partial = args.partial;
  const int64_t row = route_of_thread<kWarps>(args);
  float up_scale = 0;
  float gate_scale = 0;
  if (row >= 0) {
    const int expert = partial.route_expert[row];
    const float t = partial.route_scale[row];
    up_scale = __fmul_rn(partial.up_alpha[expert], t);
    gate_scale = __fmul_rn(partial.gate_alpha[expert], t);
  }
  const auto activated = [&](float up, float gate) {
    const float u = __fmul_rn(up, up_scale);
    const float g = __fmul_rn(gate, gate_scale);
    if (kKind == Activated::kSquaredRelu) return bf16_from_f32(squared_relu(u));
    if (kKind == Activated::kSwiGlu) return bf16_from_f32(swiglu(g, u));
    return bf16_from_f32(activate_otherwise(partial.activation, u, g));
  };
  const auto pair = [&](float2 up, float2 gate) {
    return activated(up.x, gate.x) | static_cast<uint32_t>(activated(up.y, gate.y)) << 16;
  };
  // Half blocks of the row, where not negative.
  const auto half_blocks = [&](const auto& halves, auto& blocks) {
    constexpr int kCount = sizeof(blocks) / sizeof(HalfBlock);
    constexpr int kSums = kKind == Activated::kSquaredRelu ? 1 : 2;  // of a half block
    int first[kCount * kSums];
    Sums sums[kCount * kSums];
#pragma unroll
    for (int i = 0; i < kCount * kSums; ++i) {
      const int half = halves[i / kSums];
      first[i] = kSums == 2 ? fragments::kSlabRows * half + 4 * (i % 2)
                            : fragments::fragment_row(kHalfBlock * half);
      if (half < 0) first[i] = -1;
    }
    add_splits(args, row, first, sums);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      HalfBlock& x = blocks[i];
      if constexpr (kSums == 2) {  // of a slab, low is up and high is gate
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const Sums& s = sums[2 * i + j];
          x.pairs[2 * j] = pair({s.low.x, s.low.y}, {s.high.x, s.high.y});
          x.pairs[2 * j + 1] = pair({s.low.z, s.low.w}, {s.high.z, s.high.w});
        }
      } else {
        const Sums& s = sums[i];
        x.pairs[0] = pair({s.low.x, s.low.y}, {});
        x.pairs[1] = pair({s.high.x, s.high.y}, {});
        x.pairs[2] = pair({s.low.z, s.low.w}, {});
        x.pairs[3] = pair({s.high.z, s.high.w}, {});
      }
      if (partial.intermediate != nullptr && halves[i] >= 0) {
        reinterpret_cast<uint4*>(partial.intermediate + row * args.cols)[halves[i]] = bits_of(x);
      }
    }
  };
  constexpr int kThreads = 32 * kWarps;
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const int num_halves = row < 0 ? 0 : static_cast<int>(args.cols / kHalfBlock);
  int kept_halves[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int half = thread + i * kThreads;
    kept_halves[i] = half < num_halves ? half : -1;
  }
  HalfBlock kept[kKept];
  half_blocks(kept_halves, kept);
  quantize_row<kWarps, true>(
      row,
      out,
      [&](HalfBlock(&to)[kKept]) {
#pragma unroll
        for (int i = 0; i < kKept; ++i)
          to[i] = kept[i];
      },
      [&](int half) {
        const int halves[] = {half};
        HalfBlock blocks[1];
        half_blocks(halves, blocks);
        return blocks[0];
      },
      InPlace{});
}

}  // namespace

cudaError_t configure_requantize() {
  return for_each_warps_per_row([](auto warps) {
    return configure_all(requantize_kernel<warps()>,
                         activate_and_requantize_kernel<warps(), Activated::kSquaredRelu>,
                         activate_and_requantize_kernel<warps(), Activated::kSwiGlu>,
                         activate_and_requantize_kernel<warps(), Activated::kOther>);
  });
}

cudaError_t requantize(const Requantize& args, const LaunchOptions& options) {
  QuantizedRows out;
  out.cols = args.cols;
  out.codes = args.codes;
  out.block_scales = args.block_scales;
  out.token_scale = args.token_scale;
  out.operand = args.rows;
  return with_warps_per_row(args.cols, [&](auto warps) {
    auto* kernel = requantize_kernel<warps()>;
    if (args.partial.splits > 0) {
      switch (args.partial.activation.type) {
        case ActivationType::kSquaredRelu:
          kernel = activate_and_requantize_kernel<warps(), Activated::kSquaredRelu>;
          break;
        case ActivationType::kSwiGlu:
          kernel = activate_and_requantize_kernel<warps(), Activated::kSwiGlu>;
          break;
        default:
          kernel = activate_and_requantize_kernel<warps(), Activated::kOther>;
      }
    }
    const unsigned blocks = blocks_for_rows<warps()>(args.max_routes);
    return launch(kernel, blocks, kQuantizeThreads<warps()>, 0, options, args, out);
  });
}

}  // namespace hexpert::cuda
