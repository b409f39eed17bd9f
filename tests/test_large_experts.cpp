// The large end of the conformance grid: hundreds of experts of 1024 x 2048.
#include <gtest/gtest.h>

#include "moe_case.hpp"
#include "staged.hpp"

namespace hexpert {
namespace {

using test::MoeCase;
using test::MoeData;

TEST(LargeExperts, SquaredRelu) {
  test::expect_every_backend({.num_experts = 384,
                              .top_k = 8,
                              .hidden_size = 1024,
                              .intermediate_size = 2048,
                              .tokens = 515,
                              .activation = test::kSquaredRelu});
}

TEST(LargeExperts, SwiGlu) {
  test::expect_every_backend({.num_experts = 256,
                              .top_k = 2,
                              .hidden_size = 1024,
                              .intermediate_size = 2048,
                              .tokens = 1024,
                              .activation = test::kSwiGlu});
}

}  // namespace
}  // namespace hexpert
