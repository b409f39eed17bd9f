#include "cpu/cpu_backend.hpp"

#include <fmt/format.h>

#include "cpu/forward.hpp"

namespace hexpert::cpu {
namespace {

enum class Isa { kScalar, kAvx2, kAvx512Vnni, kAmx };

template <Isa isa>
Engine engine() {
  if constexpr (isa == Isa::kScalar) return {scalar_kernels(), nullptr};
  if constexpr (isa == Isa::kAvx2) return {avx2_kernels(), nullptr};
  if constexpr (isa == Isa::kAvx512Vnni) return {avx512_vnni_kernels(), nullptr};
  if constexpr (isa == Isa::kAmx) return {avx512_vnni_kernels(), amx_kernels()};
}

template <Isa isa>
Support available(const Device&) {
  const CpuFeatures& f = cpu_features();
  const std::string_view missing = isa == Isa::kAmx          ? f.amx_missing
                                   : isa == Isa::kAvx512Vnni ? f.avx512_missing
                                   : isa == Isa::kAvx2       ? f.avx2_missing
                                                             : std::string_view();
  return missing.empty() ? Support::yes()
                         : Support::no(fmt::format("this machine lacks {}", missing));
}

Support supports(const MoeProblem&, const ExpertShape&) {
  return Support::yes();
}

template <Isa isa>
int64_t workspace_bytes(const MoeProblem& problem,
                        const ExpertShape& shape,
                        const MoeOptions& options) {
  return forward_workspace_bytes(engine<isa>(), problem, shape, options.num_threads);
}

template <Isa isa>
std::string describe(const MoeProblem& problem, const ExpertShape&, const MoeOptions& options) {
  const Engine e = engine<isa>();
  const bool amx = e.amx != nullptr && !options.batch_invariant;
  return fmt::format(
      "integer GEMM {} x {} tokens{}, chunks of {} tokens",
      e.kernels->name,
      e.kernels->widest_tile,
      amx ? fmt::format(", AMX-BF16 above {} tokens an expert", kAmxAboveTokens) : "",
      std::min(problem.max_tokens, kChunkTokens));
}

template <Isa isa>
Status run(const ForwardArgs& args) {
  return forward(engine<isa>(), args);
}

template <Isa isa>
constexpr Backend make_backend(std::string_view name) {
  return {name,
          DeviceType::kCpu,
          available<isa>,
          supports,
          workspace_bytes<isa>,
          describe<isa>,
          run<isa>};
}

}  // namespace

constinit const Backend cpu_amx_backend = make_backend<Isa::kAmx>("cpu-amx");
constinit const Backend cpu_avx512_vnni_backend = make_backend<Isa::kAvx512Vnni>("cpu-avx512-vnni");
constinit const Backend cpu_avx2_backend = make_backend<Isa::kAvx2>("cpu-avx2");
constinit const Backend cpu_scalar_backend = make_backend<Isa::kScalar>("cpu-scalar");

}  // namespace hexpert::cpu
