"""Arrays of other frameworks: the same bits, and no copies."""

import numpy as np
import pytest
from conftest import Layer, aligned, from_bf16

import hexpert


def test_ml_dtypes(layer):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    plan = layer.plan()
    want = plan.forward(*layer.inputs)
    x = layer.hidden_states.view(ml_dtypes.bfloat16)
    got = plan.forward(x, layer.routing_map, layer.probabilities)
    assert got.dtype == ml_dtypes.bfloat16 and np.array_equal(got.view(np.uint16), want)
    assert want.dtype == np.uint16, "bits in, bits out"
    codes, scales, outer = hexpert.quantize_tokens(x)
    values = hexpert.dequantize(codes, scales.view(ml_dtypes.float8_e4m3fn), outer)
    assert np.array_equal(values, hexpert.dequantize(codes, scales, outer))
    weights = hexpert.ExpertWeights.prepare(
        layer.fc1.view(ml_dtypes.bfloat16), layer.fc2.view(ml_dtypes.bfloat16)
    )
    assert np.array_equal(layer.plan(weights).forward(*layer.inputs), want)
    with pytest.raises(TypeError, match=r"hidden_states: expected bf16, got \[6, 48\] e4m3"):
        hexpert.quantize_tokens(np.zeros((6, 48), ml_dtypes.float8_e4m3fn))


def test_numpy_writes_in_place(layer):
    out = aligned(np.full((6, 48), np.nan, np.float32))
    assert layer.plan().forward(*layer.inputs, out) is out and np.isfinite(out).all()
    memory = hexpert.quantize_tokens(layer.hidden_states)
    for array in memory:
        array.view(np.uint8)[...] = 0xA5
    again = hexpert.quantize_tokens(layer.hidden_states, out=memory)
    assert all(a is b for a, b in zip(again, memory))
    assert np.abs(hexpert.dequantize(*memory) - from_bf16(layer.hidden_states)).max() < 0.6


def test_jax(layer):
    jax = pytest.importorskip("jax")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    plan = layer.plan()
    want = plan.forward(*layer.inputs)
    x, ids, p = (
        jax.device_put(array, jax.devices("cpu")[0])
        for array in (layer.hidden_states.view(ml_dtypes.bfloat16), *layer.inputs[1:])
    )
    got = plan.forward(x, ids, p)
    assert isinstance(got, jax.Array) and got.dtype == jax.numpy.bfloat16
    assert np.array_equal(np.asarray(got).view(np.uint16), want)
    assert all(isinstance(a, jax.Array) for a in hexpert.quantize_tokens(x))
    with pytest.raises(ValueError, match="out: expected memory that may be written, got a read-only"):
        plan.forward(x, ids, p, jax.numpy.zeros_like(x))


class Exporter:
    """Speaks DLPack and nothing else, the old way or the new one."""

    def __init__(self, array, versioned):
        self.array, self.versioned = array, versioned

    def __dlpack__(self, stream=None, **keywords):
        if not self.versioned and keywords:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("versioned", [False, True])
def test_any_exporter(layer, versioned):
    plan = layer.plan()
    want = plan.forward(*layer.inputs)
    ids, p = (Exporter(a, versioned) for a in layer.inputs[1:])
    assert np.array_equal(plan.forward(layer.hidden_states, ids, p), want)
    out = np.zeros((6, 48), np.float32)
    plan.forward(*layer.inputs, Exporter(out, versioned))
    assert out.any()
    out.flags.writeable = False
    with pytest.raises((ValueError, TypeError), match="out: expected"):
        plan.forward(*layer.inputs, Exporter(out, versioned))


def test_checkpoint():
    from pathlib import Path

    model = Path(__file__).parents[2] / "data" / "tiny-swiglu" / "model.safetensors"
    weights = hexpert.ExpertWeights.load(model, "model.layers.0.mlp")
    assert (weights.num_local_experts, weights.hidden_size, weights.intermediate_size) == (16, 144, 104)
    part = hexpert.ExpertWeights.load(str(model), "model.layers.0.mlp", first_expert=4, num_experts=2)
    for a, b in zip(
        part.export_projection(1, hexpert.Projection.DOWN), weights.export_projection(5, hexpert.Projection.DOWN)
    ):
        assert np.array_equal(a, b)
    codes, scales, alpha = weights.export_projection(0, hexpert.Projection.GATE)
    assert codes.shape == (104, 72) and scales.shape == (104, 9) and alpha > 0
    values = hexpert.dequantize(codes, scales, np.array([alpha], np.float32))
    assert values.shape == (104, 144) and np.isfinite(values).all()
    with pytest.raises(ValueError, match="not found"):
        hexpert.ExpertWeights.load(model, "model.layers.9.mlp")


def test_sizes_and_names():
    weights = Layer(gated=False).weights()
    assert (weights.num_local_experts, weights.hidden_size, weights.intermediate_size) == (4, 48, 40)
    assert (weights.padded_hidden_size, weights.padded_intermediate_size) == (256, 256)
    assert (weights.gated, weights.device, weights.layout_name) == (False, "cpu", "cpu-tiles")
    assert weights.size_bytes > 0 and "4 experts" in repr(weights)
    plan = Layer(gated=False).plan(backend="reference")
    assert plan.backend_name == "reference" and plan.plan.startswith("reference | ")
    assert [b.name for b in hexpert.list_backends()][-1] == "reference"
    assert hexpert.query_backend("cpu") in [b.name for b in hexpert.list_backends() if b.available]
