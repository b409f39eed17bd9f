// The PTX instructions that the kernels need and CUDA C++ does not name.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace hexpert::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// --- mbarrier ---

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
// Makes initialised barriers visible to the asynchronous proxy.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// --- copies from global to shared memory ---

// 4 bytes, by this thread.
__device__ __forceinline__ void async_copy4(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
// Arrives when all async_copy4() of this thread so far have.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// `bytes` contiguous bytes, both ends aligned to 16.
__device__ __forceinline__ void bulk_copy(void* to,
                                          const void* from,
                                          int bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from),
      "r"(bytes),
      "r"(shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void prefetch_to_l2(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// A box of a three-dimensional tensor, from element (x, y, z) on.
__device__ __forceinline__ void tensor_copy(
    void* to, const void* tensor_map, int x, int y, int z, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(tensor_map),
      "r"(shared_address(barrier)),
      "r"(x),
      "r"(y),
      "r"(z)
      : "memory");
}
// A box of a two-dimensional tensor, from element (x, y) on.
__device__ __forceinline__ void tensor_copy(
    void* to, const void* tensor_map, int x, int y, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
      "l"(tensor_map),
      "r"(shared_address(barrier)),
      "r"(x),
      "r"(y)
      : "memory");
}
// The same, of three dimensions, to both blocks of a cluster, where `to` and `barrier` are at the same place in each.
__device__ __forceinline__ void tensor_copy_to_both(
    void* to, const void* tensor_map, int x, int y, int z, uint64_t* barrier) {
  constexpr uint16_t kBoth = 3;
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(tensor_map),
      "r"(shared_address(barrier)),
      "r"(x),
      "r"(y),
      "r"(z),
      "h"(kBoth)
      : "memory");
}

// --- clusters ---

__device__ __forceinline__ int cluster_blocks() {
  int blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}
// All threads of the cluster that have not exited.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Writes `value` to shared memory of the cluster's block `rank`, whose barrier expects the four bytes.
__device__ __forceinline__ void send_to(int* to, int value, uint64_t* barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there, its_barrier;\n"
      "mapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 its_barrier, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %1, [its_barrier];\n"
      "}" ::"r"(shared_address(to)),
      "r"(value),
      "r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
// Arrives at the barrier of the cluster's block `rank`.
__device__ __forceinline__ void mbarrier_arrive_at(uint64_t* barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// --- barriers of a block and of the grid ---

// Of `threads` threads of the block, all in whole warps; 0 is __syncthreads().
__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Counts these threads in, without waiting.
__device__ __forceinline__ void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ uint64_t add_release(uint64_t* to, uint64_t value) {
  uint64_t former;
  asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;"
               : "=l"(former)
               : "l"(to), "l"(value)
               : "memory");
  return former;
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// --- mma ---

// c[16 rows, 8] += a[16 rows, 16 k] * b[16 k, 8], FP16 to FP32. A lane has rows lane / 4 and 8 on and
// columns 2 (lane % 4) and the next of c, column lane / 4 of b.
__device__ __forceinline__ void mma(float (&c)[4],
                                    const uint32_t (&a)[4],
                                    uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- wgmma ---

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// K-major operand in shared memory: rows of 128 bytes, 128-byte swizzle, groups of 8 rows 1024 bytes
// apart.
__device__ __forceinline__ uint64_t operand_descriptor(const void* shared) {
  constexpr uint64_t kLeadingOffset = uint64_t{1} << 16;  // unused with this swizzle
  constexpr uint64_t kStrideOffset = uint64_t{1024 / 16} << 32;
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return ((shared_address(shared) & 0x3FFFF) >> 4) | kLeadingOffset | kStrideOffset | kSwizzle128;
}
// To be added to a descriptor: moves on by so many bytes.
__device__ __forceinline__ constexpr uint64_t operand_offset(int bytes) {
  return static_cast<uint64_t>(bytes / 16);
}

// --- registers ---

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// threadIdx.x, read where it is written: nothing derived from it stays in registers elsewhere.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}
// Of the block, known to be the same in all lanes: code that depends on it stays converged.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / 32, 0);
}
// Transposes an 8x8 matrix of 16-bit values held by a warp: lane l has row l / 4, columns
// 2 (l % 4) and the next.
__device__ __forceinline__ uint32_t transpose8x8(uint32_t pair) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}
// Four E4M3 values, the first lowest, to FP16.
__device__ __forceinline__ void e4m3_to_half(uint32_t four, __half2& low, __half2& high) {
  asm("{\n"
      ".reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, second;\n"
      "}"
      : "=r"(reinterpret_cast<uint32_t&>(low)), "=r"(reinterpret_cast<uint32_t&>(high))
      : "r"(four));
}
// The bits of `ones` where the mask has ones, of `zeros` elsewhere.
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t ones, uint32_t zeros) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(result) : "r"(mask), "r"(ones), "r"(zeros));
  return result;
}

// --- programmatic dependent launch ---

// Blocks until the kernels before this one have finished and their writes are visible.
__device__ __forceinline__ void wait_for_predecessor() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Lets the next kernel of the stream start; it waits as above before it reads results.
__device__ __forceinline__ void allow_successor() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace hexpert::cuda::ptx
