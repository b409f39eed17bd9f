#include "cuda_ceilings.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <vector>

#include "common.hpp"
#include "cuda_kernels.hpp"

namespace hexpert::tools {
namespace {

constexpr int64_t kBytes = int64_t{1} << 32;
constexpr int kRepeats = 9;

// cuBLAS without its headers: the library is looked up at run time, if it is there at all.
class Cublas {
 public:
  Cublas() {
    for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so"}) {
      library_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (library_ != nullptr) break;
    }
    if (library_ == nullptr) return;
    const auto create = symbol<int (*)(void**)>("cublasCreate_v2");
    set_stream_ = symbol<int (*)(void*, cudaStream_t)>("cublasSetStream_v2");
    destroy_ = symbol<int (*)(void*)>("cublasDestroy_v2");
    gemm_ = symbol<Gemm>("cublasGemmEx");
    if (create == nullptr || set_stream_ == nullptr || destroy_ == nullptr || gemm_ == nullptr ||
        create(&handle_) != 0) {
      handle_ = nullptr;
    }
  }
  ~Cublas() {
    if (handle_ != nullptr) destroy_(handle_);
    if (library_ != nullptr) dlclose(library_);
  }
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  bool available() const { return handle_ != nullptr; }
  // c = a^T b, all n x n, bf16, f32 sums.
  bool multiply(int n, const uint16_t* a, const uint16_t* b, uint16_t* c, cudaStream_t stream) {
    constexpr int kTranspose = 1;   // CUBLAS_OP_T
    constexpr int kNot = 0;         // CUBLAS_OP_N
    constexpr int kBf16 = 14;       // CUDA_R_16BF
    constexpr int kF32 = 68;        // CUBLAS_COMPUTE_32F
    constexpr int kAlgorithm = -1;  // CUBLAS_GEMM_DEFAULT
    const float one = 1;
    const float zero = 0;
    return set_stream_(handle_, stream) == 0 && gemm_(handle_,
                                                      kTranspose,
                                                      kNot,
                                                      n,
                                                      n,
                                                      n,
                                                      &one,
                                                      a,
                                                      kBf16,
                                                      n,
                                                      b,
                                                      kBf16,
                                                      n,
                                                      &zero,
                                                      c,
                                                      kBf16,
                                                      n,
                                                      kF32,
                                                      kAlgorithm) == 0;
  }

 private:
  using Gemm = int (*)(void*,
                       int,
                       int,
                       int,
                       int,
                       int,
                       const void*,
                       const void*,
                       int,
                       int,
                       const void*,
                       int,
                       int,
                       const void*,
                       void*,
                       int,
                       int,
                       int,
                       int);
  template <typename Function>
  Function symbol(const char* name) const {
    return reinterpret_cast<Function>(dlsym(library_, name));
  }
  void* library_ = nullptr;
  void* handle_ = nullptr;
  int (*set_stream_)(void*, cudaStream_t) = nullptr;
  int (*destroy_)(void*) = nullptr;
  Gemm gemm_ = nullptr;
};

// Median seconds of `body`, enqueued once a sample.
template <typename Body>
double time(const CudaStream& stream, const Body& body) {
  const CudaGraph graph(stream, body);
  graph.replay();
  std::vector<double> seconds;
  seconds.reserve(kRepeats);
  for (int i = 0; i < kRepeats; ++i)
    seconds.push_back(graph.replay());
  return median(std::move(seconds));
}

double dense_tflops(const CudaStream& stream) {
  Cublas cublas;
  if (!cublas.available()) return 0;
  constexpr int kSize = 8192;
  constexpr int kCalls = 16;  // about 25 ms a sample, so that the clock settles
  const CudaArray<uint16_t> a(int64_t{kSize} * kSize);
  const CudaArray<uint16_t> b(int64_t{kSize} * kSize);
  const CudaArray<uint16_t> c(int64_t{kSize} * kSize);
  cuda_require(fill_bf16(a.data(), a.size(), 1, 1, stream.get()));
  cuda_require(fill_bf16(b.data(), b.size(), 1, 2, stream.get()));
  if (!cublas.multiply(kSize, a.data(), b.data(), c.data(), stream.get()))
    return 0;  // its allocations
  cuda_require(cudaStreamSynchronize(stream.get()));
  const double seconds = time(stream, [&] {
    for (int i = 0; i < kCalls; ++i)
      cublas.multiply(kSize, a.data(), b.data(), c.data(), stream.get());
  });
  return 2.0 * kSize * kSize * kSize * kCalls / seconds * 1e-12;
}

}  // namespace

CudaCeilings measure_ceilings(const CudaStream& stream) {
  CudaCeilings ceilings;
  {
    const CudaArray<uint8_t> from(kBytes);
    const CudaArray<uint8_t> to(kBytes);
    const CudaArray<uint32_t> sink(1);
    cuda_require(cudaMemsetAsync(from.data(), 1, static_cast<size_t>(kBytes), stream.get()));
    for (int variant = 0; variant < kStreamVariants; ++variant) {
      const double read = time(stream, [&] {
        cuda_require(read_all(from.data(), kBytes, sink.data(), variant, stream.get()));
      });
      const double copy = time(stream, [&] {
        cuda_require(copy_all(from.data(), to.data(), kBytes, variant, stream.get()));
      });
      const auto bytes = static_cast<double>(kBytes);
      ceilings.read_gbs = std::max(ceilings.read_gbs, bytes / read * 1e-9);
      ceilings.copy_gbs = std::max(ceilings.copy_gbs, 2.0 * bytes / copy * 1e-9);
    }
  }
  ceilings.dense_tflops = dense_tflops(stream);
  return ceilings;
}

}  // namespace hexpert::tools
