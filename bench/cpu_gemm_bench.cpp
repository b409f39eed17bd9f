// Speed of the CPU GEMMs beside the ceiling of the unit that they use.
//
//     cpu_gemm_bench int|amx [seconds a case]       pin it, for example with taskset -c 2,3
//
// A unit may be shared with a neighbour and switches within a run, so each sample is bracketed by
// two readings, and the samples of a free and of a shared unit are reported apart:
//
//     amx   ceiling: 2 x 2 tiles with operands in the L1 cache; shared: far below the highest seen
//     int   ceiling: vpdpbusd alone. A busy hardware thread on the same core leaves that as it is but takes
//           half of the front end; shared: vpdpbusd with three no-ops each is slow
//
// Weights come from memory: each sample takes the next stretch of a buffer larger than the caches.
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/amx_tiles.hpp"
#include "cpu/gemm_amx.hpp"
#include "format/layout.hpp"

namespace {

using namespace hexpert;
using namespace hexpert::cpu;
namespace tiles = layout::cpu_tiles;

constexpr size_t kWeightBytes = size_t{1} << 30;  // a thread
constexpr int64_t kStripsPerSample = 8;
double seconds_per_case = 0.25;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

uint8_t* huge_pages(size_t bytes) {
  void* p = mmap(
      nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) std::exit(1);
  madvise(p, bytes, MADV_HUGEPAGE);
  return static_cast<uint8_t*>(p);
}

double median(std::vector<double> v) {
  if (v.empty()) return 0;
  std::nth_element(v.begin(), v.begin() + static_cast<int64_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

// What a unit gives now.
struct Reading {
  double ceiling;  // GFLOP/s or GOP/s
  double state;    // compared with the highest seen: how much of the unit is free
};

// What a kernel works on.
struct Case {
  int64_t m;
  int64_t k;
  std::vector<Nvfp4Row> rows;
  uint8_t* activations;
  uint8_t* panel;
  float* c;
};

struct AmxGemm {
  // Of the highest state: at least, and at most.
  static constexpr double kFree = 0.7;
  static constexpr double kShared = 0.4;
  static bool available() { return amx_kernels() != nullptr; }
  static void begin(const Case& job) {
    amx_kernels()->begin();
    amx_kernels()->expand(job.rows.data(), job.m, job.k, job.activations);
  }
  static void end() { amx_kernels()->end(); }
  static void multiply(const uint8_t* weights, const Case& job) {
    const PairSink sink{nullptr, [](void*, int64_t, const float*) {}};
    amx_kernels()->gemm_pairs(
        weights, 2 * kStripsPerSample, job.k, job.activations, job.m, job.c, job.panel, sink);
  }
  __attribute__((target("amx-tile,amx-bf16"))) static Reading read(const uint8_t* operands) {
    constexpr int kRounds = 60;
    HardwareTiles::zero_first();
    HardwareTiles::zero_second();
    const double start = now();
    for (int i = 0; i < kRounds; ++i) {
      for (int step = 0; step < 8; ++step) {
        const uint8_t* a = operands + 4096 * step;
        _tile_loadd(6, a + 2048, kTileStride);
        _tile_loadd(4, a, kTileStride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, a + 3072, kTileStride);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + 1024, kTileStride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    const double rate = kRounds * 8 * 65536.0 / (now() - start) * 1e-9;
    return {rate, rate};
  }
};

struct IntGemm {
  static constexpr double kFree = 0.8;
  static constexpr double kShared = 0.65;
  static bool available() { return avx512_vnni_kernels() != nullptr; }
  static void begin(const Case& job) {
    avx512_vnni_kernels()->expand_int(job.rows.data(), job.m, job.k, job.activations);
  }
  static void end() {}
  static void multiply(const uint8_t* weights, const Case& job) {
    const int64_t strip_bytes = tiles::matrix_bytes(tiles::kStripRows, job.k);
    for (int64_t i = 0; i < kStripsPerSample; ++i) {
      avx512_vnni_kernels()->gemm_int(
          weights + i * strip_bytes, job.k, job.activations, job.m, job.c);
    }
  }
  static Reading read(const uint8_t*) { return {vpdpbusd<false>(), vpdpbusd<true>()}; }

  // Twelve chains of it: GOP/s.
  template <bool kThreeNops>
  __attribute__((target("avx512f,avx512vnni"))) static double vpdpbusd() {
    constexpr int kRounds = 3000;
    const __m512i x = _mm512_set1_epi8(1);
    __m512i sum[12];
#pragma GCC unroll 12
    for (__m512i& s : sum)
      s = x;
    const double start = now();
    for (int i = 0; i < kRounds; ++i) {
#pragma GCC unroll 12
      for (__m512i& s : sum) {
        asm volatile("vpdpbusd %1, %1, %0" : "+v"(s) : "v"(x));
        if constexpr (kThreeNops) asm volatile("nop\n nop\n nop");
      }
    }
    return kRounds * 12 * 128 / (now() - start) * 1e-9;
  }
};

template <typename Gemm>
struct Worker {
  uint8_t* weights = huge_pages(kWeightBytes);
  uint8_t* scratch = huge_pages(size_t{16} << 20);
  struct Sample {
    double rate;
    Reading before, after;
  };
  std::vector<Sample> samples;
  double highest = 0;  // state ever seen

  Worker() {
    uint64_t x = 0x9E3779B97F4A7C15U;
    for (size_t i = 0; i < kWeightBytes; i += 8) {
      x ^= x << 13;
      x ^= x >> 7;
      x ^= x << 17;
      const uint64_t positive =
          i % tiles::kRecordBytes >= tiles::kScalesAt ? x & 0x3F3F3F3F3F3F3F3FU : x;
      std::memcpy(weights + i, &positive, 8);
    }
  }
  void measure(int64_t m, int64_t k) {
    samples.clear();
    const std::vector<uint8_t> codes(static_cast<size_t>(k / 2), 0x2B);
    const std::vector<uint8_t> scales(static_cast<size_t>(k / 16), 0x38);
    const Case one{m,
                   k,
                   {static_cast<size_t>(m), Nvfp4Row{codes.data(), scales.data()}},
                   scratch,
                   scratch + (8 << 20),
                   reinterpret_cast<float*>(scratch + (5 << 20))};
    const uint8_t* operands = scratch + (4 << 20);
    Gemm::begin(one);
    const int64_t rows = kStripsPerSample * tiles::kStripRows;
    const auto sample_bytes = static_cast<size_t>(tiles::matrix_bytes(rows, k));
    size_t at = 0;
    Reading last = Gemm::read(operands);
    for (const double start = now(); now() - start < seconds_per_case; at += sample_bytes) {
      if (at + sample_bytes > kWeightBytes) at = 0;
      const double begin = now();
      Gemm::multiply(weights + at, one);
      const double rate = static_cast<double>(2 * rows * m * k) / (now() - begin) * 1e-9;
      const Reading after = Gemm::read(operands);
      samples.push_back({rate, last, after});
      last = after;
      highest = std::max(highest, last.state);
    }
    Gemm::end();
  }
  // Medians of rate and ceiling over the samples whose states lie in (low, high) x highest.
  struct Summary {
    double rate, ceiling;
    size_t samples;
  };
  Summary summary(double low, double high) const {
    std::vector<double> rates, ceilings;
    for (const Sample& s : samples) {
      if (std::min(s.before.state, s.after.state) < low * highest) continue;
      if (std::max(s.before.state, s.after.state) > high * highest) continue;
      rates.push_back(s.rate);
      ceilings.push_back((s.before.ceiling + s.after.ceiling) / 2);
    }
    return {median(rates), median(ceilings), rates.size()};
  }
};

template <typename Gemm>
int run() {
  if (!Gemm::available()) {
    std::puts("this machine lacks the instructions");
    return 77;
  }
  std::vector<Worker<Gemm>> workers(2);
  std::puts("                      unit free               unit shared");
  std::puts("     K tokens threads    GOP/s  ceiling ratio    GOP/s  ceiling ratio");
  for (const int64_t k : {2048, 768, 2688}) {
    for (const int64_t m : {8, 16, 32, 64, 128, 256}) {
      for (const size_t threads : {size_t{1}, size_t{2}}) {
        std::vector<std::thread> running;
        for (size_t t = 1; t < threads; ++t)
          running.emplace_back([&, t] { workers[t].measure(m, k); });
        workers[0].measure(m, k);
        for (std::thread& thread : running)
          thread.join();
        std::printf(
            "%6d %6d %7d", static_cast<int>(k), static_cast<int>(m), static_cast<int>(threads));
        for (const auto& [low, high] :
             {std::pair{Gemm::kFree, 2.0}, std::pair{0.0, Gemm::kShared}}) {
          double rate = 0;
          double limit = 0;
          size_t samples = SIZE_MAX;
          for (size_t t = 0; t < threads; ++t) {
            const auto s = workers[t].summary(low, high);
            rate += s.rate;
            limit += s.ceiling;
            samples = std::min(samples, s.samples);
          }
          if (samples < 8) {
            std::printf("        -        -     -");
          } else {
            std::printf(" %8.0f %8.0f %4.0f%%", rate, limit, 100 * rate / limit);
          }
        }
        std::puts("");
        std::fflush(stdout);
      }
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view kernel = argc > 1 ? argv[1] : "";
  if (argc > 2) seconds_per_case = std::atof(argv[2]);
  if (kernel == "int") return run<IntGemm>();
  if (kernel == "amx") return run<AmxGemm>();
  std::puts("usage: cpu_gemm_bench int|amx [seconds a case]");
  return 2;
}
