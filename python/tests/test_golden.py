"""The bits of the golden vectors, through Python."""

import numpy as np
import pytest
from conftest import GROUPS, aligned, from_bf16, golden_cases

import hexpert

LAYOUTS = {
    "scale_linear": hexpert.ScaleLayout.LINEAR,
    "scale_128x4": hexpert.ScaleLayout.L128X4,
    "scale_8x4": hexpert.ScaleLayout.L8X4,
}
CPU_BACKENDS = [b.name for b in hexpert.list_backends() if b.available and not b.name.startswith("cuda")]


def same_bits(got, want):
    return np.array_equal(got.view(np.uint8).ravel(), want.view(np.uint8).ravel())


@pytest.mark.parametrize(
    "case, golden", [p for group in ("per_token", "per_tensor", "nonfinite", "four_over_six") for p in golden_cases(group)]
)
def test_quantizers(case, golden):
    options = {}
    if case[:3] in ("mae", "mse"):
        options = dict(four_over_six=hexpert.FourOverSix[case[:3].upper()], e4m3_max=256 if "256" in case else 448)
    per_token = "row_scale" in golden
    for name, layout in LAYOUTS.items():
        if name not in golden:
            continue
        if per_token:
            padded = 2 * golden["data"].shape[1]
            codes, scales, outer = hexpert.quantize_tokens(golden["x"], padded, scale_layout=layout, **options)
        else:
            codes, scales, outer = hexpert.quantize_matrix(golden["x"], scale_layout=layout, **options)
        assert same_bits(codes, golden["data"])
        assert same_bits(scales, golden[name])
        if per_token or "alpha" in golden:
            assert same_bits(outer, golden["row_scale" if per_token else "alpha"])
        else:
            assert same_bits(outer, np.float32(1) / golden["encode_scale"])


def test_every_code():
    """All E2M1 codes times all E4M3 scales, and the rounding to BF16."""
    tables = GROUPS["tables"]
    e2m1, e4m3 = tables["e2m1"]["decode"], tables["e4m3"]["decode"]
    codes = np.tile(np.arange(16, dtype=np.uint8).reshape(8, 2) @ np.array([1, 16], np.uint8), (256, 1))
    scales = np.arange(256, dtype=np.uint8).reshape(256, 1)
    got = hexpert.dequantize(codes, scales, np.ones(1, np.float32))
    want = e2m1 * e4m3[:, None]
    assert np.array_equal(got, want, equal_nan=True)
    numbers = ~np.isnan(want)
    assert same_bits(got[numbers], want[numbers]), "signed zeros"
    out = aligned(np.empty((256, 16), np.uint16))
    hexpert.dequantize(codes, scales, np.ones(1, np.float32), out=out)
    assert np.array_equal(from_bf16(out)[numbers], want[numbers]), "BF16 holds every product"


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
