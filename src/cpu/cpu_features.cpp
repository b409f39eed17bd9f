// What the processor and the operating system allow.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu/kernels.hpp"

namespace hexpert::cpu {
namespace {

struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf cpuid_leaf(unsigned leaf, unsigned subleaf) {
  Leaf r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

// State components that the operating system saves (XCR0).
uint64_t enabled_state() {
  if ((cpuid_leaf(1, 0).ecx >> 27 & 1) == 0) return 0;  // OSXSAVE
  unsigned low = 0;
  unsigned high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// Linux hands out the 8 KiB of tile state on request only, once per process.
bool request_tile_permission() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

struct Requirement {
  bool present;
  std::string_view name;
};

template <size_t N>
std::string_view first_missing(const Requirement (&list)[N]) {
  for (const Requirement& r : list) {
    if (!r.present) return r.name;
  }
  return {};
}

CpuFeatures detect() {
  const Leaf l1 = cpuid_leaf(1, 0);
  const Leaf l7 = cpuid_leaf(7, 0);
  const uint64_t state = enabled_state();
  const auto bit = [](unsigned word, int i) { return (word >> i & 1) != 0; };
  CpuFeatures f;
  f.avx2_missing = first_missing({{(state & 0x6) == 0x6, "AVX state saved by the system"},
                                  {bit(l7.ebx, 5), "AVX2"},
                                  {bit(l1.ecx, 12), "FMA"},
                                  {bit(l1.ecx, 29), "F16C"}});
  f.avx2_f16c_fma = f.avx2_missing.empty();
  f.avx512_missing = first_missing({{f.avx2_f16c_fma, "AVX2, FMA and F16C"},
                                    {(state & 0xE6) == 0xE6, "AVX-512 state saved by the system"},
                                    {bit(l7.ebx, 16), "AVX512F"},
                                    {bit(l7.ebx, 17), "AVX512DQ"},
                                    {bit(l7.ebx, 30), "AVX512BW"},
                                    {bit(l7.ebx, 31), "AVX512VL"},
                                    {bit(l7.ecx, 1), "AVX512_VBMI"},
                                    {bit(l7.ecx, 11), "AVX512_VNNI"}});
  f.avx512_vnni_vbmi = f.avx512_missing.empty();
  f.amx_missing = first_missing({{f.avx512_vnni_vbmi, "AVX-512 with VNNI and VBMI"},
                                 {bit(l7.edx, 24), "AMX-TILE"},
                                 {bit(l7.edx, 22), "AMX-BF16"},
                                 {(state & 0x60000) == 0x60000, "AMX state saved by the system"}});
  if (f.amx_missing.empty() && !request_tile_permission()) {
    f.amx_missing = "permission of the system for AMX tile state";
  }
  f.amx_bf16 = f.amx_missing.empty();
  return f;
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

const Kernels& best_kernels() {
  if (const Kernels* k = avx512_vnni_kernels()) return *k;
  if (const Kernels* k = avx2_kernels()) return *k;
  return *scalar_kernels();
}

}  // namespace hexpert::cpu
