#include "ceilings.hpp"

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "common.hpp"
#include "cpu/kernels.hpp"

namespace hexpert::tools {
namespace {

constexpr int64_t kSliceBytes = int64_t{256} << 20;
constexpr int64_t kSlices = 5;
constexpr int64_t kUnrollBytes = 512;

// --- reading: the sum keeps the loads alive ---

template <int kPrefetchBytes>
__attribute__((target("avx512f"))) uint64_t read_512(const uint8_t* p, int64_t bytes) {
  __m512i sums[8] = {};
  for (int64_t i = 0; i < bytes; i += kUnrollBytes) {
    for (int j = 0; j < 8; ++j) {
      const uint8_t* at = p + i + 64 * j;
      if constexpr (kPrefetchBytes > 0) _mm_prefetch(at + kPrefetchBytes, _MM_HINT_T0);
      sums[j] = _mm512_add_epi64(sums[j], _mm512_load_si512(at));
    }
  }
  for (int j = 1; j < 8; ++j)
    sums[0] = _mm512_add_epi64(sums[0], sums[j]);
  alignas(64) uint64_t lanes[8];
  _mm512_store_si512(lanes, sums[0]);
  uint64_t total = 0;
  for (uint64_t lane : lanes)
    total += lane;
  return total;
}

template <int kPrefetchBytes>
__attribute__((target("avx2"))) uint64_t read_256(const uint8_t* p, int64_t bytes) {
  __m256i sums[8] = {};
  for (int64_t i = 0; i < bytes; i += kUnrollBytes) {
    for (int j = 0; j < 16; ++j) {
      const uint8_t* at = p + i + 32 * j;
      if constexpr (kPrefetchBytes > 0) {
        if (j % 2 == 0) _mm_prefetch(at + kPrefetchBytes, _MM_HINT_T0);
      }
      sums[j % 8] =
          _mm256_add_epi64(sums[j % 8], _mm256_load_si256(reinterpret_cast<const __m256i*>(at)));
    }
  }
  for (int j = 1; j < 8; ++j)
    sums[0] = _mm256_add_epi64(sums[0], sums[j]);
  alignas(32) uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sums[0]);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

uint64_t read_64(const uint8_t* p, int64_t bytes) {
  uint64_t sums[8] = {};
  for (int64_t i = 0; i < bytes; i += 64) {
    for (int j = 0; j < 8; ++j) {
      uint64_t word = 0;
      std::memcpy(&word, p + i + 8 * j, 8);
      sums[j] += word;
    }
  }
  uint64_t total = 0;
  for (uint64_t sum : sums)
    total += sum;
  return total;
}

struct ReadVariant {
  std::string_view name;
  uint64_t (*read)(const uint8_t*, int64_t);
  bool (*available)();
};
bool has_avx512() {
  return cpu::cpu_features().avx512_vnni_vbmi;
}
bool has_avx2() {
  return cpu::cpu_features().avx2_f16c_fma;
}
constexpr std::array kReadVariants = {
    ReadVariant{"512-bit loads", read_512<0>, has_avx512},
    ReadVariant{"512-bit loads, prefetch 2 KiB ahead", read_512<2048>, has_avx512},
    ReadVariant{"512-bit loads, prefetch 4 KiB ahead", read_512<4096>, has_avx512},
    ReadVariant{"512-bit loads, prefetch 8 KiB ahead", read_512<8192>, has_avx512},
    ReadVariant{"256-bit loads", read_256<0>, has_avx2},
    ReadVariant{"256-bit loads, prefetch 4 KiB ahead", read_256<4096>, has_avx2},
    ReadVariant{"64-bit loads", read_64, [] { return true; }},
};

// --- arithmetic: loops of independent instructions, in assembly so that nothing is optimised ---

#define HX_ZERO(r) "vpxor %%xmm" r ",%%xmm" r ",%%xmm" r "\n\t"
#define HX_ZERO_ALL \
  HX_ZERO("0")      \
  HX_ZERO("1")      \
  HX_ZERO("2")      \
  HX_ZERO("3")      \
  HX_ZERO("4")      \
  HX_ZERO("5")      \
  HX_ZERO("6")      \
  HX_ZERO("7") HX_ZERO("8") HX_ZERO("9") HX_ZERO("10") HX_ZERO("11") HX_ZERO("12") HX_ZERO("13")
#define HX_CLOBBERS                                                                        \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
      "xmm11", "xmm12", "xmm13", "cc"
#define HX_DOT(r) "vpdpbusd %%zmm12,%%zmm13,%%zmm" r "\n\t"
#define HX_MADD(t, a)                   \
  "vpmaddubsw %%ymm12,%%ymm13,%%ymm" t  \
  "\n\t"                                \
  "vpmaddwd %%ymm12,%%ymm" t ",%%ymm" t \
  "\n\t"                                \
  "vpaddd %%ymm" t ",%%ymm" a ",%%ymm" a "\n\t"

// Each runs `n` iterations and returns the operations of one.
double burst_vnni(int64_t n) {
  // Twelve accumulators hide the latency of five cycles of two ports.
  __asm__ volatile(HX_ZERO_ALL "1:\n\t" HX_DOT("0") HX_DOT("1") HX_DOT("2") HX_DOT("3") HX_DOT("4")
                       HX_DOT("5") HX_DOT("6") HX_DOT("7") HX_DOT("8") HX_DOT("9") HX_DOT("10")
                           HX_DOT("11") "dec %0\n\tjnz 1b\n\tvzeroupper"
                   : "+r"(n)
                   :
                   : HX_CLOBBERS);
  return 12.0 * 2 * 64;
}

double burst_avx2(int64_t n) {
  __asm__ volatile(HX_ZERO_ALL "1:\n\t" HX_MADD("6", "0") HX_MADD("7", "1") HX_MADD("8", "2")
                       HX_MADD("9", "3") HX_MADD("10", "4")
                           HX_MADD("11", "5") "dec %0\n\tjnz 1b\n\tvzeroupper"
                   : "+r"(n)
                   :
                   : HX_CLOBBERS);
  return 6.0 * 2 * 32;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Per iteration two tiles of each operand come from a 32 KiB working set and meet in four products.
double burst_amx(int64_t n) {
  constexpr int64_t kHalf = int64_t{16} << 10;
  constexpr int64_t kStep = 2048;  // two tiles of 1 KiB
  alignas(64) static const uint8_t operands[2 * kHalf] = {};
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = 16;
  }
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
  __asm__ volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3"
                   :
                   :
                   :);
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t* a = operands + i * kStep % kHalf;
    __asm__ volatile(
        "tileloadd (%0,%2,1),%%tmm4\n\t"
        "tileloadd (%1,%2,1),%%tmm6\n\t"
        "tileloadd 1024(%0,%2,1),%%tmm5\n\t"
        "tileloadd 1024(%1,%2,1),%%tmm7\n\t"
        "tdpbf16ps %%tmm6,%%tmm4,%%tmm0\n\t"
        "tdpbf16ps %%tmm7,%%tmm4,%%tmm1\n\t"
        "tdpbf16ps %%tmm6,%%tmm5,%%tmm2\n\t"
        "tdpbf16ps %%tmm7,%%tmm5,%%tmm3"
        :
        : "r"(a), "r"(a + kHalf), "r"(int64_t{64})
        : "memory");
  }
  __asm__ volatile("tilerelease" : : :);
  return 4.0 * 2 * 16 * 16 * 32;
}

struct Burst {
  double (*run)(int64_t);
  int64_t iterations;  // a few milliseconds on a current core
};

// Null when this machine lacks the unit.
Burst burst_of(ComputeUnit unit) {
  const cpu::CpuFeatures& features = cpu::cpu_features();
  switch (unit) {
    case ComputeUnit::kAvx2:
      return {features.avx2_f16c_fma ? burst_avx2 : nullptr, 1'500'000};
    case ComputeUnit::kVnni:
      return {features.avx512_vnni_vbmi ? burst_vnni : nullptr, 1'000'000};
    case ComputeUnit::kAmx:
      return {features.amx_bf16 ? burst_amx : nullptr, 60'000};
    case ComputeUnit::kNone:
      break;
  }
  return {nullptr, 0};
}

volatile uint64_t read_sink;  // keeps the sums from being optimised away

}  // namespace

std::string_view to_string(ComputeUnit unit) {
  switch (unit) {
    case ComputeUnit::kAvx2:
      return "AVX2 integer";
    case ComputeUnit::kVnni:
      return "AVX-512 VNNI";
    case ComputeUnit::kAmx:
      return "AMX-BF16";
    case ComputeUnit::kNone:
      break;
  }
  return "none";
}

ComputeUnit compute_unit_of(std::string_view backend) {
  if (backend == "cpu-amx") return ComputeUnit::kAmx;
  if (backend == "cpu-avx512-vnni") return ComputeUnit::kVnni;
  if (backend == "cpu-avx2") return ComputeUnit::kAvx2;
  return ComputeUnit::kNone;
}

Result<Ceilings> Ceilings::create(int num_threads) {
  AlignedBuffer buffer = AlignedBuffer::zeroed(kSlices * kSliceBytes);
  if (!buffer) {
    return Status(ErrorCode::kOutOfMemory,
                  "bench: no memory for the 1.3 GB that the read bandwidth is measured on");
  }
  // Every page is written: pages that were only read would all be the one zero page.
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t i = 0; i < buffer.size(); i += 64)
    buffer.data()[i] = static_cast<uint8_t>(i >> 6);

  Ceilings ceilings(num_threads, std::move(buffer));
  double best = 0;
  for (size_t variant = 0; variant < kReadVariants.size(); ++variant) {
    if (!kReadVariants[variant].available()) continue;
    std::vector<double> samples;
    for (int64_t i = 0; i < kSlices; ++i)
      samples.push_back(ceilings.read_slice(variant));
    if (const double gbs = median(samples); gbs > best) {
      best = gbs;
      ceilings.variant_ = variant;
    }
  }
  return ceilings;
}

double Ceilings::read_gbs() {
  return read_slice(variant_);
}

double Ceilings::read_slice(size_t variant) {
  const uint8_t* slice = buffer_.data() + next_slice_ * kSliceBytes;
  next_slice_ = (next_slice_ + 1) % kSlices;
  const double start = now_seconds();
  uint64_t sum = 0;
#pragma omp parallel num_threads(num_threads_) reduction(+ : sum)
  {
    // Each thread reads one contiguous part, a multiple of the unrolled step.
    const int64_t steps = kSliceBytes / kUnrollBytes;
    const int64_t threads = omp_get_num_threads();
    const int64_t begin = steps * omp_get_thread_num() / threads * kUnrollBytes;
    const int64_t end = steps * (omp_get_thread_num() + 1) / threads * kUnrollBytes;
    sum += kReadVariants[variant].read(slice + begin, end - begin);
  }
  read_sink = sum;
  return static_cast<double>(kSliceBytes) / (now_seconds() - start) * 1e-9;
}

double Ceilings::compute_gops(ComputeUnit unit) const {
  const Burst burst = burst_of(unit);
  if (burst.run == nullptr) return 0;
  double operations = 0;
  const double start = now_seconds();
#pragma omp parallel num_threads(num_threads_) reduction(+ : operations)
  operations += burst.run(burst.iterations) * static_cast<double>(burst.iterations);
  return operations / (now_seconds() - start) * 1e-9;
}

std::string_view Ceilings::read_variant() const {
  return kReadVariants[variant_].name;
}

}  // namespace hexpert::tools
