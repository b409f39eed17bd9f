"""Every refusal: the type of the exception, and a text that names argument, requirement and what was given."""

import contextlib
import enum
import os
import re
import resource
from pathlib import Path

import numpy as np
import pytest
from conftest import Layer, aligned, bf16, from_bf16

import hexpert


@contextlib.contextmanager
def little_memory():
    """1 GB of address space beside what is in use: a machine may promise more memory than it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 30), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def refuses(error, text, function, *arguments, **keywords):
    with pytest.raises(error, match=re.escape(text)) as caught:
        function(*arguments, **keywords)
    assert type(caught.value) is error


def test_exceptions():
    assert issubclass(hexpert.UnsupportedError, RuntimeError)
    assert hexpert.UnsupportedError.__module__ == "hexpert"


WRONG = [
    (None, TypeError, "expected an array of bf16 (numpy, torch, or any with __dlpack__), got None"),
    ([[1.0]], TypeError, "got list"),
    (np.zeros((6, 48), np.float32), TypeError, "expected bf16, got [6, 48] f32"),
    (np.zeros((6, 48), np.float64), TypeError, "expected bf16, got [6, 48] float64"),
    (np.zeros((6, 48), bool), TypeError, "expected bf16, got [6, 48] bool"),
    (np.zeros((6, 48), ">u2"), TypeError, "expected bf16, got [6, 48] uint16 in big-endian byte order"),
]


@pytest.mark.parametrize("value, error, text", WRONG)
def test_element_types(layer, value, error, text):
    name = "hidden_states: "
    refuses(error, name, hexpert.quantize_tokens, value)
    refuses(error, text, hexpert.quantize_tokens, value)
    with pytest.raises(error, match="hidden_states: "):
        layer.plan().forward(value, layer.routing_map, layer.probabilities)
    value = value[None] if isinstance(value, np.ndarray) else value
    for name, stacks in (("fc1_weight", (value, layer.fc2)), ("fc2_weight", (layer.fc1, value))):
        with pytest.raises(error, match=f"{name}: "):
            hexpert.ExpertWeights.prepare(*stacks)


def array_arguments(layer):
    """A call for every argument that is an array, and whether it is written."""
    weights = layer.weights()
    plan = layer.plan(weights)
    x, ids, p = layer.inputs
    quantized = hexpert.quantize_tokens(x)
    fields = weights.export_canonical()
    yield "hidden_states", lambda a: hexpert.quantize_tokens(a), False
    yield "matrix", lambda a: hexpert.quantize_matrix(a), False
    for i, name in enumerate(("codes", "block_scales", "outer")):
        parts = [*quantized]

        def quantize(a, i=i, parts=parts):
            return hexpert.quantize_tokens(x, out=(*parts[:i], a, *parts[i + 1 :]))

        def dequantize(a, i=i, parts=parts):
            return hexpert.dequantize(*parts[:i], a, *parts[i + 1 :])

        yield f"out[{i}]", quantize, True
        yield name, dequantize, False
    yield "out", lambda a: hexpert.dequantize(*quantized, out=a), True
    yield "fc1_weight", lambda a: hexpert.ExpertWeights.prepare(a, layer.fc2), False
    yield "fc2_weight", lambda a: hexpert.ExpertWeights.prepare(layer.fc1, a), False
    yield "fc1_weight", lambda a: weights.refresh(a, layer.fc2), False
    yield "fc2_weight", lambda a: weights.refresh(layer.fc1, a), False
    yield "fc1_weight", lambda a: weights.set_expert(0, a, layer.fc2[0]), False
    yield "fc2_weight", lambda a: weights.set_expert(0, layer.fc1[0], a), False
    yield "hidden_states", lambda a: plan.forward(a, ids, p), False
    yield "routing_map", lambda a: plan.forward(x, a, p), False
    yield "probabilities", lambda a: plan.forward(x, ids, a), False
    yield "out", lambda a: plan.forward(x, ids, p, a), True
    yield "workspace", lambda a: layer.plan(weights, workspace=a), True
    for name in fields:
        yield name, lambda a, name=name: weights.import_canonical(**(fields | {name: a})), False
        yield name, lambda a, name=name: weights.export_canonical_into(**(fields | {name: a})), True


# Fits no argument by its size, whatever the element type.
NO_ARRAYS = {
    "None": lambda dtype: None,
    "a list": lambda dtype: [1.0],
    "float64": lambda dtype: np.zeros((6, 48)),
    "big-endian": lambda dtype: np.zeros((5, 7), np.dtype(dtype).newbyteorder(">") if dtype != np.uint8 else ">u2"),
    "zero-size": lambda dtype: np.zeros((0, 0, 0), dtype),
    "strided columns": lambda dtype: aligned(np.zeros((6, 96), dtype))[:, ::2],
}


@pytest.mark.parametrize("kind", NO_ARRAYS)
def test_every_array_argument(layer, kind):
    """Whatever is no array for it is refused by an exception that names the argument."""
    for name, call, written in array_arguments(layer):
        if kind == "None" and (written or name == "fc1_gate_alpha") and not name.startswith("out["):
            continue  # as if not given
        for dtype in (np.uint8, np.uint16, np.int32, np.float32):
            with pytest.raises((TypeError, ValueError)) as caught:
                call(NO_ARRAYS[kind](dtype))
            text = str(caught.value)
            assert f"{name}: expected" in text or f"{name}: every dimension must be" in text


def test_every_written_argument_may_be_written(layer):
    outputs = {
        "out[0]": np.uint8,
        "out[1]": np.uint8,
        "out[2]": np.float32,
        "out": np.float32,
        "workspace": np.uint8,
        **{name: array.dtype for name, array in layer.weights().export_canonical().items()},
    }
    for name, call, written in array_arguments(layer):
        if written:
            array = np.zeros(8, outputs[name])
            array.flags.writeable = False
            refuses(ValueError, f"{name}: expected memory that may be written, got a read-only array", call, array)


class TheirActivationType(enum.IntEnum):  # FlashInfer's
    Swiglu = 3


class SmallInteger:
    def __index__(self):
        return 2


def scalar_arguments(layer):
    """A call for every argument that is no array: its name, its kind and whether None may be given."""
    weights = layer.weights()
    plan = layer.plan(weights)
    quantized = hexpert.quantize_tokens(layer.hidden_states)
    sizes = dict(num_local_experts=1, hidden_size=2, intermediate_size=2, gated=True)
    model = Path(__file__).parents[2] / "data" / "tiny-swiglu" / "model.safetensors"
    calls = [
        (
            [hexpert.RoutedMoe.create, hexpert.RoutedMoe.workspace_bytes_for],
            dict(weights=weights, **layer.problem),
            dict(
                **dict.fromkeys(["max_tokens", "top_k", "num_experts", "local_expert_offset", "num_threads"], "int"),
                **dict.fromkeys(["alpha", "beta", "limit", "situ_b"], "float"),
                situ_c="float or None",
                weights="ExpertWeights",
                activation="ActivationType",
                backend="str",
                batch_invariant="bool",
            ),
        ),
        (
            [plan.forward],
            dict(zip(("hidden_states", "routing_map", "probabilities"), layer.inputs)),
            {"token_capacity": "int or None", "use_bounded_rows": "bool", "stream": "stream"},
        ),
        (
            [hexpert.quantize_tokens],
            dict(hidden_states=layer.hidden_states),
            {
                "padded_hidden_size": "int or None",
                "scale_layout": "ScaleLayout",
                "four_over_six": "FourOverSix or None",
                "e4m3_max": "float",
                "num_threads": "int",
                "stream": "stream",
            },
        ),
        (
            [hexpert.quantize_matrix],
            dict(matrix=layer.hidden_states),
            {
                "scale_layout": "ScaleLayout",
                "four_over_six": "FourOverSix or None",
                "e4m3_max": "float",
                "num_threads": "int",
            },
        ),
        (
            [hexpert.dequantize],
            dict(zip(("codes", "block_scales", "outer"), quantized)),
            {"scale_layout": "ScaleLayout"},
        ),
        ([hexpert.query_backend], {}, {"device": "device"}),
        (
            [hexpert.ExpertWeights.prepare],
            dict(fc1_weight=layer.fc1, fc2_weight=layer.fc2),
            {
                "backend": "str",
                "refuse_nonfinite": "bool",
                "num_threads": "int",
                "device": "device or None",
                "stream": "stream",
            },
        ),
        (
            [hexpert.ExpertWeights.allocate],
            sizes,
            {
                **dict.fromkeys(["num_local_experts", "hidden_size", "intermediate_size", "num_threads"], "int"),
                "gated": "bool",
                "backend": "str",
                "device": "device",
            },
        ),
        (
            [hexpert.ExpertWeights.load],
            dict(path=model, prefix="model.layers.0.mlp"),
            {
                **dict.fromkeys(["first_expert", "num_experts", "num_threads"], "int"),
                **dict.fromkeys(["prefix", "backend"], "str"),
                "path": "path",
                "device": "device",
            },
        ),
        ([weights.refresh], dict(fc1_weight=layer.fc1, fc2_weight=layer.fc2), {"stream": "stream"}),
        (
            [weights.set_expert],
            dict(expert=0, fc1_weight=layer.fc1[0], fc2_weight=layer.fc2[0]),
            {"expert": "int", "stream": "stream"},
        ),
        (
            [weights.export_projection],
            dict(expert=0, projection=hexpert.Projection.UP),
            {"expert": "int", "projection": "Projection"},
        ),
    ]
    for functions, arguments, kinds in calls:
        for function in functions:
            for name, kind in kinds.items():
                kind, _, none = kind.partition(" or ")
                call = lambda value, f=function, a=arguments, n=name: f(**(a | {n: value}))  # noqa: E731
                yield name, call, kind, none != "" or kind == "stream"


WRONG_SCALARS = [None, "x", b"x", True, 1, 3, 1.5, 2**70, -1, [1], object(), TheirActivationType.Swiglu, "\udcff"]
TAKEN = {"int": (int,), "bool": (bool,), "float": (int, float), "str": (str,), "device": (), "stream": (int,),
         "path": (str, bytes)}  # fmt: skip
WORDS = {
    "int": "an int",
    "bool": "True or False",
    "float": "a float",
    "str": "a str",
    "device": '"cpu", "cuda" or "cuda:N" with N in 0..9999',
    "stream": "a cudaStream_t as int >= 0",
    "path": "str, bytes or os.PathLike",
}


def test_every_scalar_argument(layer):
    for name, call, kind, none_is_taken in scalar_arguments(layer):
        for value in WRONG_SCALARS:
            if isinstance(value, TAKEN.get(kind, ())) or (value is None and none_is_taken):
                continue
            wanted = WORDS.get(kind, f"hexpert.{kind}")
            given = {list: "list", object: "object"}.get(type(value), repr(value))
            error = ValueError if kind == "device" and isinstance(value, str) else TypeError
            refuses(error, f"{name}: expected {wanted}, got {given}", call, value)


def test_numbers_out_of_range(layer):
    bits = {"num_threads": 32}
    for name, call, kind, _ in scalar_arguments(layer):
        if kind == "int":
            for value in (2**70, -(2**70)):
                refuses(ValueError, f"{name}: expected an int of {bits.get(name, 64)} bits, got {value}", call, value)
            refuses(ValueError, f"{name}: expected an int of {bits.get(name, 64)} bits, got int", call, 10**5000)
        elif kind == "stream":
            for value in (-1, 2**64):
                refuses(ValueError, f"stream: expected a cudaStream_t as int >= 0, got {value}", call, value)
        elif kind == "float":
            refuses(ValueError, f"{name}: expected a float of 64 bits, got", call, 10**400)
    refuses(ValueError, "num_threads: expected an int of 32 bits, got 2147483648", layer.plan, num_threads=1 << 31)


def test_numbers_of_other_types(layer):
    """What Python's own functions take for an integer or a float is one."""
    want = layer.plan().forward(*layer.inputs)
    for two in (np.int64(2), np.uint8(2), np.array(2), SmallInteger()):
        plan = layer.plan(top_k=two, alpha=np.float32(1), beta=0, num_threads=two)
        assert np.array_equal(plan.forward(*layer.inputs), want)
        got = plan.forward(*layer.inputs, token_capacity=two, use_bounded_rows=np.bool_(True), stream=two)
        assert np.array_equal(got[:2], want[:2]) and not got[2:].any()
        assert np.array_equal(plan.forward(*layer.inputs, token_capacity=two, use_bounded_rows=np.bool_(False)), want)
    for kind in (TheirActivationType.Swiglu, 3, np.int32(3)):
        with pytest.raises(TypeError, match="activation: expected hexpert.ActivationType, got"):
            layer.plan(activation=kind)
    broken = type("Broken", (), {"__index__": lambda self: 1 // 0})()
    with pytest.raises(ZeroDivisionError):
        layer.plan(top_k=broken)


def test_prepare_shapes(layer):
    prepare = hexpert.ExpertWeights.prepare
    refuses(ValueError, "fc1_weight: expected rank 3, got [80, 48] bf16", prepare, layer.fc1[0], layer.fc2)
    refuses(ValueError, "fc2_weight: every dimension must be in 1..", prepare, layer.fc1, layer.fc2[:0])
    refuses(
        ValueError, "fc2_weight: expected 4 experts to match fc1_weight, got 2", prepare, layer.fc1, layer.fc2[:2]
    )
    refuses(ValueError, "fc1_weight: expected 48 columns", prepare, aligned(layer.fc1[:, :, :32]), layer.fc2)
    refuses(
        ValueError,
        "fc1_weight: expected 40 rows (intermediate_size) or 80 (gate and up), got 60",
        prepare,
        aligned(layer.fc1[:, :60]),
        layer.fc2,
    )
    refuses(ValueError, "fc1_weight: expected a packed row-major", prepare, layer.fc1[:, ::2], layer.fc2)
    refuses(ValueError, "misaligned: fc1_weight: address 0x", prepare, odd_address(layer.fc1), layer.fc2)
    layer.fc2[3, 0, 0] = 0x7FC0
    refuses(
        ValueError, "fc2_weight: expert 3 holds a NaN", prepare, layer.fc1, layer.fc2, refuse_nonfinite=True
    )


def odd_address(values):
    memory = aligned(np.zeros(values.size + 1, values.dtype))
    memory[1:] = values.ravel()
    return memory[1:].reshape(values.shape)


def byte_apart(values):
    memory = aligned(np.zeros(values.nbytes + 1, np.uint8))
    memory[1:] = values.view(np.uint8)
    return memory[1:].view(values.dtype)


def test_refresh(layer):
    weights = layer.weights()
    before = weights.export_canonical()
    other = Layer(gated=False)
    refuses(ValueError, "gated: the weights were prepared for 1, got 0", weights.refresh, other.fc1, other.fc2)
    other = Layer(hidden=64)
    refuses(
        ValueError, "hidden_size: the weights were prepared for 48, got 64", weights.refresh, other.fc1, other.fc2
    )
    refuses(ValueError, "expert", weights.set_expert, 4, layer.fc1[0], layer.fc2[0])
    after = weights.export_canonical()
    assert all(np.array_equal(before[name], after[name]) for name in before), "a refused refresh wrote"


def test_canonical(layer):
    weights = layer.weights()
    fields = weights.export_canonical()
    refuses(
        TypeError,
        "fc1_alpha: expected an array of f32",
        weights.import_canonical,
        **(fields | {"fc1_alpha": 1.0}),
    )
    refuses(
        TypeError,
        "fc2_data: expected u8, got",
        weights.import_canonical,
        **(fields | {"fc2_data": fields["fc2_data"].view(np.int32)}),
    )
    refuses(
        ValueError,
        "fc1_data: expected 262144 elements, got [1, 512, 128] u8",
        weights.import_canonical,
        **(fields | {"fc1_data": fields["fc1_data"][:1]}),
    )
    fields["fc1_scale_swizzled"][1, 0, 0] = 0x7F
    refuses(ValueError, "non-finite weights", weights.import_canonical, **fields)
    fields["fc2_data"].flags.writeable = False
    refuses(ValueError, "fc2_data: expected memory that may be written", weights.export_canonical_into, **fields)


def test_states(layer):
    weights = layer.weights()
    state = weights.__getstate__()

    def refused(error, text, wrong):
        made = hexpert.ExpertWeights.__new__(hexpert.ExpertWeights)
        refuses(error, text, made.__setstate__, wrong)

    for size in (0, 1, 2, 3, 4, 5, 7):
        refused(ValueError, f"state: expected 6 fields, got {size}", (state + (None,))[:size])
    for wrong, given in ((None, "None"), ([*state], "list"), (3, "3")):
        refused(TypeError, f"state: expected a tuple, got {given}", wrong)
    names = ("num_local_experts", "hidden_size", "intermediate_size", "gated", "device", "state[5]")
    for i, name in enumerate(names):
        for wrong in (None, "x", 1.5, []):
            error = ValueError if (name, wrong) == ("device", "x") else TypeError
            refused(error, f"{name}: expected ", (*state[:i], wrong, *state[i + 1 :]))
    for name in state[5]:
        fields = {other: array for other, array in state[5].items() if other != name}
        refused(ValueError, f"state[5]: expected an item {name}, got none", (*state[:5], fields))
        if name != "fc1_gate_alpha":
            refused(TypeError, f"{name}: expected an array of ", (*state[:5], fields | {name: None}))
        refused(ValueError, f"{name}: expected ", (*state[:5], fields | {name: state[5][name][:1]}))


def test_quantize(layer):
    quantize = hexpert.quantize_tokens
    refuses(ValueError, "hidden_states: expected rank 2", quantize, layer.hidden_states[0])
    refuses(
        ValueError,
        "padded_hidden_size: expected a multiple of 16 and at least 48, got 32",
        quantize,
        layer.hidden_states,
        32,
    )
    for padded in (50, -16, 1 << 50):
        wanted = f"padded_hidden_size: expected a multiple of 16, 0 to 2^40, got {padded}"
        refuses(ValueError, wanted, quantize, layer.hidden_states, padded)
    refuses(
        ValueError, "hidden_states: expected a column stride of 1, got 6", quantize, bf16(np.zeros((48, 6))).T
    )
    out = quantize(layer.hidden_states)
    wanted = "out: expected a tuple of three arrays: codes, block_scales, outer; got "
    for wrong, given in ((out[0], "numpy.ndarray"), ([*out], "list"), (out[:2], "2 of them"), (3, "3")):
        refuses(TypeError, wanted + given, quantize, layer.hidden_states, out=wrong)
    refuses(
        TypeError,
        "out[2]: expected an array of f32",
        quantize,
        layer.hidden_states,
        out=(out[0], out[1], None),
    )
    out[0].flags.writeable = False
    refuses(ValueError, "out[0]: expected memory that may be written", quantize, layer.hidden_states, out=out)
    refuses(ValueError, "matrix columns: expected a multiple of 16", hexpert.quantize_matrix, bf16(np.zeros((2, 8))))
    refuses(ValueError, "argument: e4m3_max: expected 448 or 256", quantize, layer.hidden_states, e4m3_max=100,
            four_over_six=hexpert.FourOverSix.MAE)  # fmt: skip
    refuses(
        ValueError, "outer: expected 6 elements, got [5] f32", hexpert.dequantize, out[0], out[1], out[2][:5]
    )


def test_workspace(layer):
    weights = layer.weights()
    needed = hexpert.RoutedMoe.workspace_bytes_for(weights, **layer.problem)
    memory = np.zeros(needed + 512, np.uint8)
    start = -memory.ctypes.data % 256
    workspace = memory[start : start + needed]
    shared = [layer.plan(weights, workspace=workspace) for _ in range(2)]
    want = layer.plan(weights).forward(*layer.inputs)
    assert all(np.array_equal(plan.forward(*layer.inputs), want) for plan in shared)
    refuses(ValueError, "workspace too small", layer.plan, weights, workspace=workspace[:-1])
    refuses(ValueError, "misaligned: workspace", layer.plan, weights, workspace=memory[start + 1 :])
    refuses(TypeError, "workspace: expected u8, got", layer.plan, weights, workspace=workspace.view(np.float32))
    refuses(TypeError, "workspace: expected an array of u8", layer.plan, weights, workspace=64)
    workspace.flags.writeable = False
    refuses(ValueError, "workspace: expected memory that may be written", layer.plan, weights, workspace=workspace)


def test_create(layer):
    refuses(ValueError, "num_experts: expected >= 1, got 0", layer.plan, num_experts=0)
    refuses(ValueError, "top_k: expected >= 1, got 0", layer.plan, top_k=0)
    refuses(ValueError, "local_expert_offset: expected >= 0, got -1", layer.plan, local_expert_offset=-1)
    refuses(ValueError, "offset + num_local_experts <= num_experts = 4, got 1 + 4", layer.plan, local_expert_offset=1)
    refuses(ValueError, "max_tokens * top_k <= 2147483647", layer.plan, max_tokens=1 << 40)
    refuses(
        ValueError,
        "expected a gated activation for gated weights, got squared_relu",
        layer.plan,
        activation=hexpert.ActivationType.SQUARED_RELU,
    )
    oai, situ = hexpert.ActivationType.SWIGLU_OAI, hexpert.ActivationType.SITU
    for text, options in [
        ("situ_b: expected a finite number > 0, got 0", dict(activation=situ)),
        ("situ_b: expected a finite number > 0, got 0", dict(activation=situ, situ_c=1.5)),  # c without b
        ("situ_c: expected a finite number > 0, or none, got 0", dict(activation=situ, situ_b=1, situ_c=0)),
        ("alpha: expected a finite number, got nan", dict(activation=oai, alpha=float("nan"))),
        ("beta: expected a finite number, got inf", dict(activation=oai, beta=float("inf"))),
        ("limit: expected a number > 0, got -1", dict(activation=oai, limit=-1)),
        ("activation: situ_b and situ_c belong to situ, got swiglu", dict(situ_c=1.5)),
        ("num_threads: expected 0..1024, got -1", dict(num_threads=-1)),
    ]:
        refuses(ValueError, f"invalid argument: {text}", layer.plan, **options)
    for call in (
        lambda: hexpert.quantize_tokens(layer.hidden_states, num_threads=-1),
        lambda: hexpert.quantize_matrix(layer.hidden_states, num_threads=-1),
        lambda: hexpert.ExpertWeights.prepare(layer.fc1, layer.fc2, num_threads=-1),
    ):
        refuses(ValueError, "invalid argument: num_threads: expected 0..1024, got -1", call)
    refuses(ValueError, "backend: expected one of ", layer.plan, backend="abacus")
    with little_memory():
        refuses(MemoryError, "workspace: ", layer.plan, max_tokens=1, top_k=(1 << 31) - 1, num_threads=1024)
    for backend in hexpert.list_backends():
        if not backend.available and backend.device == "cpu":
            refuses(hexpert.UnsupportedError, backend.reason, layer.plan, backend=backend.name)


def test_forward(layer):
    plan = layer.plan()
    x, ids, p = layer.inputs

    def refused(error, text, *, x=x, ids=ids, p=p, out=None, **options):
        refuses(error, text, plan.forward, x, ids, p, out, **options)

    refused(ValueError, "hidden_states: expected [tokens, 48], got [6, 40] bf16", x=aligned(x[:, :40]))
    refused(ValueError, "hidden_states: expected packed rows, got [3, 48] bf16 with strides [96, 1]",
            x=x[::2], ids=ids[:3], p=p[:3])  # fmt: skip
    refused(ValueError, "routing_map: expected [6, 2], got [5, 2] i32", ids=ids[:5])
    refused(TypeError, "routing_map: expected i32 or i64, got [6, 2] int16", ids=ids.astype(np.int16))
    refused(TypeError, "routing_map: expected an array of i32 or i64", ids=None)
    refused(ValueError, "probabilities: expected [6, 2], got [6, 1] f32", p=aligned(p[:, :1]))
    refused(TypeError, "probabilities: expected f32, got [6, 2] float64", p=p.astype(np.float64))
    refused(TypeError, "probabilities: expected f32, got [6, 2] float32 in big-endian", p=p.astype(">f4"))
    refused(ValueError, "token_capacity: expected >= 0, got -1", token_capacity=-1, use_bounded_rows=True)
    refused(ValueError, "misaligned: hidden_states", x=odd_address(x))
    many = bf16(np.zeros((7, 48)))
    refused(ValueError, "expected at most max_tokens = 6 tokens, got 7", x=many,
            ids=np.zeros((7, 2), np.int32), p=np.zeros((7, 2), np.float32))  # fmt: skip


def test_out(layer):
    plan = layer.plan()
    x = layer.hidden_states

    def refused(error, text, out):
        before = np.array(out)
        refuses(error, text, plan.forward, *layer.inputs, out)
        assert np.array_equal(out, before), "written"

    refused(ValueError, "out: expected [6, 48], got [5, 48] f32", aligned(np.ones((5, 48), np.float32)))
    refused(TypeError, "out: expected bf16 or f32, got [6, 48] f16", aligned(np.ones((6, 48), np.float16)))
    refused(TypeError, "out: expected bf16 or f32, got [6, 48] float64", np.ones((6, 48)))
    refused(TypeError, "out: expected an array of bf16 or f32", [1.0])
    refused(ValueError, "out: expected packed rows", aligned(np.ones((6, 96), np.float32))[:, ::2])
    refused(ValueError, "out: expected memory that overlaps no input", x)
    read_only = aligned(np.ones((6, 48), np.float32))
    read_only.flags.writeable = False
    refused(ValueError, "out: expected memory that may be written, got a read-only array", read_only)


def test_devices():
    for name in ("tpu", "cuda:x", "cuda:", "cuda:-1", "cuda:10000", ""):
        refuses(
            ValueError,
            f'device: expected "cpu", "cuda" or "cuda:N" with N in 0..9999, got {name!r}',
            hexpert.query_backend,
            name,
        )
    if not any(b.available and b.name.startswith("cuda") for b in hexpert.list_backends()):
        refuses(hexpert.UnsupportedError, "cuda:7", hexpert.query_backend, "cuda:7")


def test_load(tmp_path):
    load = hexpert.ExpertWeights.load
    refuses(ValueError, "missing.safetensors", load, tmp_path / "missing.safetensors", "x")
    (tmp_path / "bad.safetensors").write_bytes(b"not one")
    refuses(ValueError, "invalid file", load, str(tmp_path / "bad.safetensors"), "x")
    for nul in ("a\0b", b"a\0b", Path("a\0b")):
        refuses(ValueError, "path: expected a path without NUL", load, nul, "x")
    refuses(ValueError, "not found: '\\xff': cannot open", load, os.fsdecode(b"\xff"), "x")


def test_exceptions_of_arguments_are_raised(layer):
    class Number(int):
        def __repr__(self):
            raise error

    class Location(os.PathLike):
        def __fspath__(self):
            raise error

    for error in (ValueError("mine"), TypeError("mine"), KeyboardInterrupt(), SystemExit()):
        with pytest.raises(type(error)) as caught:
            hexpert.ExpertWeights.load(Location(), "x")
        assert caught.value is error
    for error in (KeyboardInterrupt(), SystemExit()):
        with pytest.raises(type(error)) as caught:
            layer.plan(top_k=Number(2**70))
        assert caught.value is error
    error = ValueError("too many digits")
    refuses(ValueError, "top_k: expected an int of 64 bits, got ", layer.plan, top_k=Number(2**70))


def test_load_takes_every_path():
    model = Path(__file__).parents[2] / "data" / "tiny-swiglu" / "model.safetensors"
    for path in (model, str(model), os.fsencode(model)):
        assert hexpert.ExpertWeights.load(path, "model.layers.0.mlp").num_local_experts == 16


def test_zero_tokens(layer):
    plan = layer.plan()
    x, ids, p = (a[:0] for a in layer.inputs)
    assert plan.forward(x, ids, p).shape == (0, 48)
    codes, scales, outer = hexpert.quantize_tokens(x)
    assert (codes.shape, scales.shape, outer.shape) == ((0, 24), (0, 3), (0,))
    assert hexpert.dequantize(codes, scales, outer).shape == (0, 48)


def test_bounded_rows(layer):
    plan = layer.plan()
    full = from_bf16(plan.forward(*layer.inputs))
    new = plan.forward(*layer.inputs, token_capacity=4, use_bounded_rows=True)
    assert np.array_equal(from_bf16(new[:4]), full[:4]) and not new[4:].any()
    out = aligned(np.full((6, 48), 7, np.float32))
    assert plan.forward(*layer.inputs, out, token_capacity=4, use_bounded_rows=True) is out
    assert (out[4:] == 7).all() and not (out[:4] == 7).any()
    assert np.array_equal(from_bf16(plan.forward(*layer.inputs, token_capacity=2)), full), "not bounded"


def test_workspace_overlaps_no_argument(layer):
    weights = layer.weights()
    needed = hexpert.RoutedMoe.workspace_bytes_for(weights, **layer.problem)
    memory = np.zeros(needed + 512, np.uint8)
    start = -memory.ctypes.data % 256
    workspace = memory[start : start + needed]
    plan = layer.plan(weights, workspace=workspace)

    def inside(like):
        return workspace[: like.nbytes].view(like.dtype).reshape(like.shape)

    out = workspace[: 6 * 48 * 4].view(np.float32).reshape(6, 48)
    refuses(ValueError, "out: expected memory that overlaps no workspace, got [", plan.forward, *layer.inputs, out)
    for i, name in enumerate(("hidden_states", "routing_map", "probabilities")):
        inputs = [*layer.inputs]
        inputs[i] = inside(inputs[i])
        refuses(ValueError, "workspace: expected memory that overlaps no input, got [", plan.forward, *inputs)
        refuses(ValueError, f" over {name} at [", plan.forward, *inputs)
    assert not memory.any(), "a refused forward wrote to the workspace"


def test_quantizer_overlaps(layer):
    x = layer.hidden_states
    codes, scales, outer = (aligned(a) for a in hexpert.quantize_tokens(x))
    for quantize, scale in ((hexpert.quantize_tokens, outer), (hexpert.quantize_matrix, outer[:1])):
        inside = x.reshape(-1).view(np.uint8)[: codes.size].reshape(codes.shape)
        before = x.copy()
        refuses(ValueError, "out[0]: expected memory that overlaps no input", quantize, x, out=(inside, scales, scale))
        shared = codes.reshape(-1)[: scales.size].reshape(scales.shape)
        refuses(
            ValueError,
            "out[0]: expected memory that overlaps no other output",
            quantize,
            x,
            out=(codes, shared, scale),
        )
        refuses(ValueError, " over out[1] at [", quantize, x, out=(codes, shared, scale))
        refuses(
            ValueError,
            "out[2]: expected an address aligned to 4 bytes",
            quantize,
            x,
            out=(codes, scales, byte_apart(scale)),
        )
        assert np.array_equal(x, before), "a refused call wrote"
    memory = aligned(np.zeros((6, 48), np.float32))
    inside = memory.reshape(-1).view(np.uint8)[: codes.size].reshape(codes.shape)
    inside[...] = codes
    refuses(
        ValueError,
        "out: expected memory that overlaps no input",
        hexpert.dequantize,
        inside,
        scales,
        outer,
        out=memory,
    )
    refuses(ValueError, " over codes at [", hexpert.dequantize, inside, scales, outer, out=memory)
    refuses(
        ValueError, "outer: expected an address aligned to 4 bytes", hexpert.dequantize, codes, scales, byte_apart(outer)
    )
    assert np.array_equal(inside, codes), "a refused call wrote"


def test_exports_overlap_nothing(layer):
    weights = layer.weights()
    fields = weights.export_canonical()
    shared = np.full(4, 7, np.float32)
    text = "fc1_alpha: expected memory that overlaps no other output, got ["
    refuses(ValueError, text, weights.export_canonical_into, fc1_alpha=shared, fc2_alpha=shared)
    assert (shared == 7).all(), "a refused export wrote"
    weights.import_canonical(**(fields | {"fc1_gate_alpha": fields["fc1_alpha"]}))  # only read
