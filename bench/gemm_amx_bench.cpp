// Speed of the AMX-BF16 GEMM beside the ceiling of the tile unit.
//
// The unit may be shared with a neighbour, slows down several times then, and switches within a run.
// So each sample is bracketed by two of the ceiling (2 x 2 tiles, operands in the L1 cache), and the
// samples of a free and of a shared unit are reported apart. Weights come from memory: each sample
// takes the next stretch of a buffer larger than the caches.
//
// Usage: gemm_amx_bench [seconds a case]; pin it, for example with taskset -c 2,3.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "cpu/amx_tiles.hpp"
#include "cpu/gemm_amx.hpp"
#include "format/layout.hpp"

namespace {

using namespace hexpert;
using namespace hexpert::cpu;
namespace tiles = layout::cpu_tiles;

constexpr size_t kWeightBytes = size_t{1} << 30;  // a thread
constexpr int64_t kPairsPerSample = 16;
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

// GFLOP/s of the unit now, over 32 KiB of operands.
__attribute__((target("amx-tile,amx-bf16"))) double ceiling(const uint8_t* operands) {
  constexpr int kRounds = 60;
  HardwareTiles::zero_first();
  HardwareTiles::zero_second();
  const double start = now();
  for (int i = 0; i < kRounds; ++i) {
    for (int step = 0; step < 8; ++step) {
      const uint8_t* a = operands + 4096 * step;
      HardwareTiles::multiply_00(a, a + 2048);
      HardwareTiles::multiply_01(a + 3072);
      HardwareTiles::multiply_10(a + 1024);
      HardwareTiles::multiply_11();
    }
  }
  return kRounds * 8 * 65536.0 / (now() - start) * 1e-9;
}

struct Worker {
  uint8_t* weights = huge_pages(kWeightBytes);
  uint8_t* scratch = huge_pages(size_t{16} << 20);
  std::vector<double> rates, before, after;
  double highest = 0;  // ceiling ever seen

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
    rates.clear(), before.clear(), after.clear();
    const AmxKernels& amx = *amx_kernels();
    uint8_t* activations = scratch;
    uint8_t* operands = scratch + (4 << 20);
    auto* c = reinterpret_cast<float*>(scratch + (5 << 20));
    uint8_t* panel = scratch + (8 << 20);
    std::vector<uint8_t> codes(static_cast<size_t>(k / 2), 0x2B);
    std::vector<uint8_t> scales(static_cast<size_t>(k / 16), 0x38);
    std::vector<Nvfp4Row> rows(static_cast<size_t>(m), Nvfp4Row{codes.data(), scales.data()});
    amx.begin();
    amx.expand(rows.data(), m, k, activations);
    const auto sample_bytes = static_cast<size_t>(2 * kPairsPerSample * tiles::group_bytes(k));
    const PairSink sink{nullptr, [](void*, int64_t, const float*) {}};
    size_t at = 0;
    double last = ceiling(operands);
    for (const double start = now(); now() - start < seconds_per_case;) {
      if (at + sample_bytes > kWeightBytes) at = 0;
      const double begin = now();
      amx.gemm_pairs(weights + at, kPairsPerSample, k, activations, m, c, panel, sink);
      rates.push_back(static_cast<double>(kPairsPerSample * 2 * m * 32 * k) / (now() - begin) *
                      1e-9);
      before.push_back(last);
      after.push_back(last = ceiling(operands));
      highest = std::max(highest, last);
      at += sample_bytes;
    }
    amx.end();
  }
  // Medians of rate and ceiling over the samples whose ceilings lie in (low, high) x highest.
  struct Summary {
    double rate, ceiling;
    size_t samples;
  };
  Summary summary(double low, double high) const {
    std::vector<double> r, c;
    for (size_t i = 0; i < rates.size(); ++i) {
      if (std::min(before[i], after[i]) < low * highest) continue;
      if (std::max(before[i], after[i]) > high * highest) continue;
      r.push_back(rates[i]);
      c.push_back((before[i] + after[i]) / 2);
    }
    return {median(r), median(c), r.size()};
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (amx_kernels() == nullptr) {
    std::puts("no AMX-BF16 on this machine");
    return 77;
  }
  if (argc > 1) seconds_per_case = std::atof(argv[1]);
  std::vector<Worker> workers(2);
  std::puts("                      unit free               unit shared");
  std::puts("     K tokens threads  GFLOP/s  ceiling ratio  GFLOP/s  ceiling ratio");
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
        for (const auto& [low, high] : {std::pair{0.7, 2.0}, std::pair{0.0, 0.4}}) {
          double rate = 0;
          double limit = 0;
          size_t samples = SIZE_MAX;
          for (size_t t = 0; t < threads; ++t) {
            const Worker::Summary s = workers[t].summary(low, high);
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
}
