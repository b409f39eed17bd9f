// forward() allocates nothing: malloc and its family are counted, the calls of the OpenMP runtime
// included. And preparing weights survives the failure of any of its own allocations. Sanitizers bring their own malloc; there is nothing to count in their builds.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>

#include "moe_case.hpp"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HX_COUNT_ALLOCATIONS 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
    __has_feature(memory_sanitizer)
#define HX_COUNT_ALLOCATIONS 0
#endif
#endif
#ifndef HX_COUNT_ALLOCATIONS
#define HX_COUNT_ALLOCATIONS 1
#endif

namespace {
std::atomic<bool> counting{false};
std::atomic<long> allocations{0};
std::atomic<long> until_failure{0};  // operator new throws when this counts down to 0
[[maybe_unused]] void count() {
  if (counting.load(std::memory_order_relaxed)) ++allocations;
}
}  // namespace

#if HX_COUNT_ALLOCATIONS
// glibc's own names; operator new ends in malloc.
extern "C" {
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* p, size_t size);
void* __libc_memalign(size_t alignment, size_t size);

void* malloc(size_t size) {
  count();
  return __libc_malloc(size);
}
void* calloc(size_t n, size_t size) {
  count();
  return __libc_calloc(n, size);
}
void* realloc(void* p, size_t size) {
  count();
  return __libc_realloc(p, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  count();
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** out, size_t alignment, size_t size) {
  count();
  *out = __libc_memalign(alignment, size);
  return *out == nullptr ? ENOMEM : 0;
}
}

void* operator new(size_t size) {
  if (until_failure > 0 && --until_failure == 0) throw std::bad_alloc();
  if (void* p = malloc(size)) return p;
  throw std::bad_alloc();
}
// Not inlined: GCC would see free() meet operator new and warn.
[[gnu::noinline]] void operator delete(void* p) noexcept {
  free(p);
}
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept {
  free(p);
}
#endif

namespace hexpert {
namespace {

using test::MoeCase;
using test::MoeData;

template <typename Body>
long allocations_of(const Body& body) {
  allocations = 0;
  counting = true;
  body();
  counting = false;
  return allocations;
}

TEST(Allocation, IsCounted) {
  if (HX_COUNT_ALLOCATIONS == 0) GTEST_SKIP() << "a sanitizer owns malloc";
  EXPECT_EQ(allocations_of([] {
              int* volatile p = new int;
              delete p;
            }),
            1);
  EXPECT_GE(allocations_of([] { test::Bf16Vector values(100); }), 1);
}

TEST(Allocation, ForwardAllocatesNothing) {
  if (HX_COUNT_ALLOCATIONS == 0) GTEST_SKIP() << "a sanitizer owns malloc";
  MoeCase c{.num_experts = 8,
            .top_k = 3,
            .hidden_size = 100,
            .intermediate_size = 70,
            .tokens = 40,
            .activation = test::kSwiGlu};
  const ExpertWeights gated = test::make_weights(c);
  for (const Activation& activation :
       {test::kSwiGlu, test::kOai, test::kGeGlu, test::kSiTuBoth, test::kSquaredRelu}) {
    c.activation = activation;
    const ExpertWeights plain = test::make_weights(c);
    const ExpertWeights& weights = c.gated() ? gated : plain;
    const MoeData data(c);
    test::PoisonedBuffer<float> out(c.tokens * c.hidden_size);
    for (const std::string& backend : test::available_backends()) {
      for (int num_threads : {1, 2}) {
        RoutedMoe moe =
            test::make_moe(c, weights, {.backend = backend, .num_threads = num_threads});
        const MoeInputs inputs = data.inputs(c);
        const TensorView view = test::view(out, c);
        ASSERT_TRUE(moe.forward(inputs, view).ok());  // OpenMP starts its threads
        bool ok = true;
        const long count = allocations_of([&] {
          for (int i = 0; i < 3; ++i)
            ok = ok && moe.forward(inputs, view).ok();
        });
        EXPECT_TRUE(ok);
        EXPECT_EQ(count, 0) << backend << " threads " << num_threads;
      }
    }
  }
}

// Calls `body` with its first allocation failing, then its second, and so on until none fails.
template <typename Body>
int failures_until_success(const Body& body) {
  for (int failures = 0;; ++failures) {
    until_failure = failures + 1;
    const Status status = body();
    until_failure = 0;
    if (status.ok()) return failures;
    EXPECT_EQ(status.code(), ErrorCode::kOutOfMemory) << status.to_string();
    if (failures > 1000) return failures;
  }
}

TEST(Allocation, PreparationReportsExhaustedMemory) {
  if (HX_COUNT_ALLOCATIONS == 0) GTEST_SKIP() << "a sanitizer owns malloc";
  const test::Bf16Vector fc1 = test::gaussian_bf16(2 * 96 * 80, 1);
  const test::Bf16Vector fc2 = test::gaussian_bf16(2 * 80 * 48, 2);
  const ConstTensorView fc1_view(fc1.data(), DType::kBF16, {2, 96, 80});
  const ConstTensorView fc2_view(fc2.data(), DType::kBF16, {2, 80, 48});
  for (int num_threads : {1, 2}) {
    PrepareOptions options;
    options.num_threads = num_threads;
    ExpertWeights weights = ExpertWeights::prepare(fc1_view, fc2_view, options).value();
    EXPECT_GT(failures_until_success(
                  [&] { return ExpertWeights::prepare(fc1_view, fc2_view, options).status(); }),
              4);
    EXPECT_GT(failures_until_success([&] { return weights.refresh(fc1_view, fc2_view); }), 2);
    std::vector<uint8_t> data(static_cast<size_t>(2 * 512 * 256 / 2));
    CanonicalWeights canonical;
    canonical.fc1_data = data.data();
    EXPECT_GT(failures_until_success([&] { return weights.export_canonical(canonical); }), 0);
  }
}

}  // namespace
}  // namespace hexpert
