#include "cuda/stage_dump.hpp"

#include "cuda/device_memory.hpp"
#include "cuda/parts.hpp"
#include "moe/stage_dump.hpp"

namespace hexpert::cuda {
namespace {

// A device array in host memory.
template <typename T>
Result<std::vector<T>> download(const T* from, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  HX_RETURN_IF_ERROR(check(
      cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDeviceToHost), "dump"));
  return values;
}

}  // namespace

DeviceDump::DeviceDump(const ForwardArgs& args,
                       const Device& device,
                       const FragmentWeights& weights,
                       const HopperWorkspace& work)
    : args_(args), device_(device), w_(weights), work_(work) {}

Status DeviceDump::begin() {
  if (args_.dump == nullptr) return {};
  const int64_t slots = args_.rows * args_.problem->top_k;
  const auto lay_out = [&](std::byte* base) {
    Parts parts(base);
    x_codes_ = parts.take<uint8_t>(args_.rows * w_.hidden / 2);
    x_block_scales_ = parts.take<uint8_t>(args_.rows * w_.hidden / 16);
    intermediate_ = parts.take<uint16_t>(slots * w_.intermediate);
    h_codes_ = parts.take<uint8_t>(slots * w_.intermediate / 2);
    h_block_scales_ = parts.take<uint8_t>(slots * w_.intermediate / 16);
    route_output_ = parts.take<uint16_t>(slots * w_.fc2_rows);
    return parts.used();
  };
  Result<std::unique_ptr<Memory>> memory = allocate_memory(lay_out(nullptr), device_);
  if (!memory.ok()) return memory.status();
  memory_ = *std::move(memory);
  lay_out(memory_->data());
  return {};
}

// Rows past the routes are never written, nor read here.
Status DeviceDump::after_fc1(bool partial) {
  if (args_.dump == nullptr) return {};
  HX_RETURN_IF_ERROR(check(cudaStreamSynchronize(to_cuda(args_.stream)), "fc1"));
  const auto routes = download(work_.routes.num_routes, 1);
  if (!routes.ok()) return routes.status();
  routes_ = routes->front();
  if (partial) return {};
  const auto bytes = static_cast<size_t>(routes_ * w_.intermediate) * sizeof(uint16_t);
  return check(cudaMemcpyAsync(
                   intermediate_, work_.h, bytes, cudaMemcpyDeviceToDevice, to_cuda(args_.stream)),
               "dump");
}

Status DeviceDump::end(bool partial) {
  if (args_.dump == nullptr) return {};
  HX_RETURN_IF_ERROR(check(cudaStreamSynchronize(to_cuda(args_.stream)), "forward"));
  const StageDump& dump = *args_.dump;
  const int64_t slots = args_.rows * args_.problem->top_k;
  if (!partial) route_output_ = reinterpret_cast<uint16_t*>(work_.results);

  const auto x_codes = download(x_codes_, args_.rows * w_.hidden / 2);
  const auto x_scales = download(x_block_scales_, args_.rows * w_.hidden / 16);
  const auto x_token_scale = download(work_.x_token_scale, args_.rows);
  const auto permuted = download(work_.routes.expanded_to_permuted, slots);
  const auto intermediate = download(intermediate_, routes_ * w_.intermediate);
  const auto h_codes = download(h_codes_, routes_ * w_.intermediate / 2);
  const auto h_scales = download(h_block_scales_, routes_ * w_.intermediate / 16);
  const auto h_token_scale = download(work_.h_token_scale, routes_);
  const auto route_output = download(route_output_, routes_ * w_.fc2_rows);
  for (const Status& status : {x_codes.status(),
                               x_scales.status(),
                               x_token_scale.status(),
                               permuted.status(),
                               intermediate.status(),
                               h_codes.status(),
                               h_scales.status(),
                               h_token_scale.status(),
                               route_output.status()}) {
    if (!status.ok()) return status;
  }

  for (int64_t token = 0; token < args_.rows; ++token) {
    dump_quantized_row(token,
                       dump.hidden_cols,
                       x_codes->data() + token * w_.hidden / 2,
                       x_scales->data() + token * w_.hidden / 16,
                       (*x_token_scale)[static_cast<size_t>(token)],
                       w_.hidden,
                       dump.x_codes,
                       dump.x_block_scales,
                       dump.x_token_scale);
  }
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t row = (*permuted)[static_cast<size_t>(slot)];
    if (row < 0) continue;
    dump_bf16_row(slot,
                  dump.intermediate_cols,
                  intermediate->data() + row * w_.intermediate,
                  w_.intermediate,
                  dump.intermediate);
    dump_quantized_row(slot,
                       dump.intermediate_cols,
                       h_codes->data() + row * w_.intermediate / 2,
                       h_scales->data() + row * w_.intermediate / 16,
                       (*h_token_scale)[static_cast<size_t>(row)],
                       w_.intermediate,
                       dump.h_codes,
                       dump.h_block_scales,
                       dump.h_token_scale);
    dump_bf16_row(slot,
                  w_.shape.hidden_size,
                  route_output->data() + row * w_.fc2_rows,
                  w_.fc2_rows,
                  dump.route_output);
  }
  return {};
}

}  // namespace hexpert::cuda
