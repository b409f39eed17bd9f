"""The bits of the golden vectors, through Python."""

import numpy as np
import pytest
from conftest import GROUPS, golden_cases

import hexpert

LAYOUTS = {
    "scale_linear": hexpert.ScaleLayout.LINEAR,
    "scale_128x4": hexpert.ScaleLayout.L128X4,
    "scale_8x4": hexpert.ScaleLayout.L8X4,
}
CPU_BACKENDS = [b.name for b in hexpert.list_backends() if b.available and not b.name.startswith("cuda")]


def same_bits(got, want):
    return np.array_equal(got.view(np.uint8).ravel(), want.view(np.uint8).ravel())


@pytest.mark.parametrize("case, golden", golden_cases("per_token") + golden_cases("nonfinite"))
def test_per_token(case, golden):
    if "row_scale" not in golden:
        pytest.skip("a case of the matrix quantizer")
    for name, layout in LAYOUTS.items():
        if name not in golden:
            continue
        codes, scales, outer = hexpert.quantize_tokens(
            golden["x"], 2 * golden["data"].shape[1], scale_layout=layout
        )
        assert same_bits(codes, golden["data"])
        assert same_bits(scales, golden[name])
        assert same_bits(outer, golden["row_scale"])


@pytest.mark.parametrize("case, golden", golden_cases("per_tensor"))
def test_per_tensor(case, golden):
    for name, layout in LAYOUTS.items():
        codes, scales, alpha = hexpert.quantize_matrix(golden["x"], scale_layout=layout)
        assert same_bits(codes, golden["data"])
        assert same_bits(scales, golden[name])
        assert same_bits(alpha, golden["alpha"])


@pytest.mark.parametrize("case, golden", golden_cases("weights"))
def test_canonical_weights(case, golden):
    weights = hexpert.ExpertWeights.prepare(golden["fc1_weight"], golden["fc2_weight"])
    canonical = weights.export_canonical()
    for name, array in canonical.items():
        want = golden["fc1_alpha" if name == "fc1_gate_alpha" else name]
        assert same_bits(array, want), name
    copy = hexpert.ExpertWeights.allocate(
        num_local_experts=weights.num_local_experts,
        hidden_size=weights.hidden_size,
        intermediate_size=weights.intermediate_size,
        gated=weights.gated,
    )
    copy.import_canonical(**canonical)
    assert all(same_bits(a, canonical[name]) for name, a in copy.export_canonical().items())


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("case, golden", golden_cases("moe"))
def test_forward(case, golden, backend):
    stacks = GROUPS["weights"]["gated_e2_i192_h80" if case == "gated" else "relu2_e3_i96_h64"]
    num_experts, offset, _, top_k, gated = golden["config"].tolist()
    layer = hexpert.RoutedMoe.create(
        hexpert.ExpertWeights.prepare(stacks["fc1_weight"], stacks["fc2_weight"]),
        max_tokens=len(golden["hidden_states"]),
        top_k=top_k,
        num_experts=num_experts,
        local_expert_offset=offset,
        activation=hexpert.ActivationType.SWIGLU if gated else hexpert.ActivationType.SQUARED_RELU,
        backend=backend,
    )
    for ids in (golden["routing_map"], golden["routing_map"].astype(np.int64)):
        out = layer.forward(golden["hidden_states"], ids, golden["probabilities"])
        assert same_bits(out, golden["output_bf16"])
