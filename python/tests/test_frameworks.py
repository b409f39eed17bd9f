"""Arrays of other frameworks: the same bits, and no copies."""

import ast
import ctypes
from pathlib import Path

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


class Elsewhere(Exporter):
    """An exporter that says that its memory is on a GPU."""

    def __init__(self, array):
        super().__init__(array, False)

    def __dlpack__(self, **_):
        capsule = self.array.__dlpack__()
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        device_type = address(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
        ctypes.c_int32.from_address(device_type).value = 2  # kDLCUDA
        return capsule

    def __dlpack_device__(self):
        return 2, 0


def test_wrong_device(layer):
    weights = layer.weights()
    plan = layer.plan(weights)
    values = np.zeros((6, 48), np.float32)
    mismatch = "expected memory of cpu, got cuda:0"
    for place, name in ((1, "routing_map"), (2, "probabilities"), (3, "out")):
        arguments = [*layer.inputs, values]
        arguments[place] = Elsewhere(arguments[place])
        with pytest.raises(ValueError, match=f"{name}: {mismatch}"):
            plan.forward(*arguments)
    codes, scales, outer = hexpert.quantize_tokens(layer.hidden_states)
    with pytest.raises(ValueError, match="expected memory of cpu, got cuda:0"):
        hexpert.quantize_tokens(layer.hidden_states, out=(Elsewhere(codes), scales, outer))
    with pytest.raises(ValueError, match="expected memory of cpu, got cuda:0"):
        hexpert.dequantize(codes, Elsewhere(scales), outer)
    with pytest.raises(ValueError, match=f"workspace: {mismatch}"):
        layer.plan(weights, workspace=Elsewhere(np.zeros(64, np.uint8)))
    fields = weights.export_canonical()
    for call in (weights.import_canonical, weights.export_canonical_into):
        with pytest.raises(ValueError, match=f"fc2_data: {mismatch}"):
            call(**(fields | {"fc2_data": Elsewhere(fields["fc2_data"])}))


def test_exports_are_made_in_host_memory(layer):
    """Wherever `like` lies: the library writes them as host memory."""
    weights = layer.weights()
    want = weights.export_projection(0, hexpert.Projection.UP)
    fields = weights.export_canonical()
    for like in (layer.hidden_states, Elsewhere(layer.hidden_states)):
        got = weights.export_projection(0, hexpert.Projection.UP, like=like)
        assert all(np.array_equal(a, b) for a, b in zip(got, want))
        made = weights.export_canonical(like=like)
        assert all(np.array_equal(made[name], array) for name, array in fields.items())
    with pytest.raises(TypeError, match="like: expected an array or None, got int"):
        weights.export_canonical(like=3)


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


class Broken(Exporter):
    """An exporter whose methods give `device` and `capsule`, or raise them."""

    def __init__(self, device=(1, 0), capsule=None):
        self.device, self.capsule = device, capsule

    def __dlpack_device__(self):
        return self.give(self.device)

    def __dlpack__(self, **_):
        return self.give(self.capsule)

    @staticmethod
    def give(value):
        if isinstance(value, BaseException):
            raise value
        return value


def test_broken_exporters(layer):
    plan = layer.plan()
    used = np.zeros((6, 2), np.float32).__dlpack__()
    plan.forward(*layer.inputs[:2], Broken(capsule=used))
    name = "probabilities: expected f32, got Broken"
    for broken, text in [
        (Broken(capsule=used), f"{name} whose __dlpack__ gives no DLPack capsule, or one that was used"),
        (Broken(capsule=None), f"{name} whose __dlpack__ gives no DLPack capsule, or one that was used"),
        (Broken(capsule=BufferError("not now")), f"{name} that has no DLPack form: BufferError: not now"),
        (Broken(capsule=TypeError("no")), f"{name} that has no DLPack form: TypeError: no"),
        (Broken(device=ValueError("what?")), f"{name} that has no DLPack form: ValueError: what?"),
        *[
            (Broken(device=device), f"{name} whose __dlpack_device__ is no pair of integers")
            for device in (None, 1, (), (1,), ("cpu", 0))
        ],
        (np.ndarray, "probabilities: expected an array of f32 (numpy, torch, or any with __dlpack__), got type"),
        (Broken, "probabilities: expected an array of f32 (numpy, torch, or any with __dlpack__), got type"),
    ]:
        with pytest.raises(TypeError) as caught:
            plan.forward(*layer.inputs[:2], broken)
        assert str(caught.value).removeprefix("invalid dtype: ") == text
    for error in (KeyboardInterrupt(), MemoryError(), RuntimeError("the array was deleted")):
        for broken in (Broken(device=error), Broken(capsule=error)):
            with pytest.raises(type(error)) as caught:
                plan.forward(*layer.inputs[:2], broken)
            assert caught.value is error


def test_checkpoint():
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


def public(names):
    return {name for name in names if not name.startswith("_") or name == "__version__"}


def test_stubs_and_docstrings():
    """The type stubs have every name, and every name says what it is."""
    from hexpert import _core

    stubs = Path(_core.__file__).with_name("_core.pyi")
    if not stubs.exists():
        pytest.skip("a sanitized build has no stubs")

    def names_in(body):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = {node.name: node for node in body if isinstance(node, kinds)}
        for node in body:
            if isinstance(node, ast.AnnAssign):
                found[node.target.id] = node
            elif isinstance(node, ast.Assign):
                found[node.targets[0].id] = node
        return found

    module = names_in(ast.parse(stubs.read_text()).body)
    assert public(vars(_core)) == public(module) == set(hexpert.__all__)
    for name in hexpert.__all__:
        thing = getattr(hexpert, name)
        if isinstance(thing, type):
            members = public(getattr(thing, "__members__", None) or vars(thing))
            assert members <= set(names_in(module[name].body)), name
            if hasattr(thing, "__members__"):
                members = ()
            for member in members:
                assert getattr(thing, member).__doc__, f"{name}.{member} has no docstring"
        assert name == "__version__" or thing.__doc__, f"{name} has no docstring"


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
