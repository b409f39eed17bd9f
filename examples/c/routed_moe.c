#include <hexpert/hexpert.h>
#include <stdio.h>
static _Alignas(16) uint16_t fc1[2 * 32 * 16], fc2[2 * 16 * 32], x[4 * 16];  // bf16 bits
static _Alignas(16) float out[4 * 16];
int main(void) {
  const DLDataType bf16 = {kDLBfloat, 16, 1}, f32 = {kDLFloat, 32, 1}, i32 = {kDLInt, 32, 1};
  int64_t shape1[] = {2, 32, 16}, shape2[] = {2, 16, 32}, shape[] = {4, 16}, routes[] = {4, 1};
  int32_t ids[] = {0, 1, -1, 0};            // the expert of each token; -1: none
  float probabilities[] = {1, 0.5F, 1, 1};  // applied in the sum
  for (int i = 0; i < 1024; ++i)
    fc1[i] = 0x3D80, fc2[i] = 0x3D00, x[i % 64] = 0x3F80;  // 1/16, 1/32 and 1
  const DLTensor w1 = {fc1, {kDLCPU, 0}, 3, bf16, shape1, NULL, 0};
  const DLTensor w2 = {fc2, {kDLCPU, 0}, 3, bf16, shape2, NULL, 0};
  const DLTensor hidden = {x, {kDLCPU, 0}, 2, bf16, shape, NULL, 0};
  const DLTensor map = {ids, {kDLCPU, 0}, 2, i32, routes, NULL, 0};
  const DLTensor p = {probabilities, {kDLCPU, 0}, 2, f32, routes, NULL, 0};
  const DLTensor y = {out, {kDLCPU, 0}, 2, f32, shape, NULL, 0};
  hx_moe_problem plan = HX_MOE_PROBLEM_INIT;
  plan.max_tokens = 4, plan.top_k = 1, plan.num_experts = 2, plan.activation = HX_SQUARED_RELU;
  const hx_moe_inputs in = {sizeof(in), &hidden, &map, &p, 0, 0, 0};
  hx_weights* weights = NULL;
  hx_moe* layer = NULL;
  hx_status status = hx_weights_prepare(&w1, &w2, NULL, NULL, &weights);
  if (status == HX_OK) status = hx_moe_create(&plan, weights, NULL, &layer);
  if (status == HX_OK) status = hx_moe_forward(layer, &in, &y, NULL);
  puts(status == HX_OK ? hx_moe_plan(layer) : hx_last_error());
  printf("%g %g %g\n", out[0], out[16], out[32]);  // 1 0.5 0
  hx_moe_free(layer), hx_weights_free(weights);    // in any order
  return status;
}
