// The list of backends: its order, reasons, and the line that describes a plan.
#include <gtest/gtest.h>

#include "moe_case.hpp"

namespace hexpert {
namespace {

using test::available_backends;
using test::make_moe;
using test::make_weights;
using test::MoeCase;

TEST(BackendList, BestFirstReferenceLast) {
  std::vector<std::string> names;
  for (const BackendInfo& info : list_backends()) {
    names.emplace_back(info.name);
    EXPECT_EQ(info.available, info.reason.empty()) << info.name << ": " << info.reason;
  }
  EXPECT_EQ(
      names,
      (std::vector<std::string>{
          "cuda-sm90a", "cpu-amx", "cpu-avx512-vnni", "cpu-avx2", "cpu-scalar", "reference"}));
  const std::vector<std::string> available = available_backends();
  ASSERT_GE(available.size(), 2U);
  EXPECT_EQ(available.back(), "reference");
  EXPECT_EQ(query_backend(Device::cpu()).value(), available.front());
}

TEST(BackendList, WhyNot) {
  const Status not_there = find_backend("cpu-scalar", Device::cuda(1)).status();
  EXPECT_EQ(not_there.code(), ErrorCode::kUnsupportedDevice);
  EXPECT_EQ(not_there.message(), "backend: cpu-scalar: runs on cpu, not on cuda:1");
  const Status unknown = find_backend("cpu-sse", Device::cpu()).status();
  EXPECT_EQ(unknown.code(), ErrorCode::kNotFound);
  EXPECT_EQ(unknown.message(),
            "backend: expected one of cuda-sm90a, cpu-amx, cpu-avx512-vnni, cpu-avx2, cpu-scalar, "
            "reference, got cpu-sse");
  for (const BackendInfo& info : list_backends()) {
    if (info.available || info.device != DeviceType::kCpu) continue;
    const Status status = find_backend(info.name, Device::cpu()).status();
    EXPECT_EQ(status.code(), ErrorCode::kUnsupportedDevice);
    EXPECT_EQ(status.message(), "backend: " + std::string(info.name) + ": " + info.reason);
  }
}

TEST(BackendList, PlanIsOneLineThatNamesTheBackend) {
  const MoeCase c;
  const ExpertWeights weights = make_weights(c);
  for (const std::string& backend : available_backends()) {
    const RoutedMoe moe = make_moe(c, weights, {.backend = backend, .num_threads = 3});
    EXPECT_EQ(moe.backend_name(), backend);
    EXPECT_EQ(moe.plan().find('\n'), std::string::npos);
    EXPECT_EQ(moe.plan().rfind(backend, 0), 0U) << moe.plan();
    EXPECT_NE(moe.plan().find("threads 3"), std::string::npos) << moe.plan();
  }
}

}  // namespace
}  // namespace hexpert
