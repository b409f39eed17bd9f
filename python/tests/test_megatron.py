"""Megatron-Core's names: signatures, fields, bytes and semantics."""

import copy
import dataclasses
import enum
import gc
import inspect
import os
import pickle
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import reference  # noqa: E402
from conftest import golden_cases  # noqa: E402

import hexpert  # noqa: E402
import hexpert.megatron as megatron  # noqa: E402

FIELDS = [
    *["hidden_size", "intermediate_size", "padded_hidden_size", "padded_intermediate_size", "gated"],
    *["fc1_data", "fc1_scale_swizzled", "fc1_scale", "fc1_alpha"],
    *["fc2_data", "fc2_scale_swizzled", "fc2_scale", "fc2_alpha", "fc2_input_scale"],
]
BUFFERS = [name for name in FIELDS[5:-1] if name not in ("fc1_scale", "fc2_scale")]


def stacks(gated=True, experts=3, hidden=80, inter=104, seed=0):
    generator = torch.Generator().manual_seed(seed)
    fc1 = torch.randn(experts, (2 if gated else 1) * inter, hidden, generator=generator) / 8
    fc2 = torch.randn(experts, hidden, inter, generator=generator) / 8
    return fc1.bfloat16(), fc2.bfloat16()


def inputs(tokens=9, hidden=80, top_k=2, experts=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, hidden, generator=generator).bfloat16(),
        torch.randint(-1, experts, (tokens, top_k), generator=generator),
        torch.rand(tokens, top_k, generator=generator),
    )


ROUTING = dict(num_experts=6, local_expert_offset=2, activation_type=megatron.ActivationType.SWIGLU)


def test_constants():
    assert megatron.HAVE_FLASHINFER_ROUTED_NVFP4 is True
    assert (megatron.NVFP4_BLOCK_SIZE, megatron.FLOAT4_E2M1_MAX, megatron.FLOAT8_E4M3_MAX) == (16, 6.0, 448.0)
    constant = torch.tensor(megatron.PER_TOKEN_ACTIVATION_GLOBAL_SCALE)
    assert constant.view(torch.int32).item() == 0x39C30C31
    if not torch.cuda.is_available():
        assert megatron.require_flashinfer_routed_nvfp4() is None


@pytest.mark.parametrize("device, initialized", [("cpu", False), ("cuda:0", False), ("cuda:1", True)])
def test_what_can_run_is_what_is_required(monkeypatch, device, initialized):
    asked = []

    def current_device():
        assert initialized, "CUDA would be initialized by this"
        return int(device[-1])

    def query(device):
        asked.append(device)
        raise hexpert.UnsupportedError("no backend")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: device != "cpu")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "current_device", current_device)
    monkeypatch.setattr(hexpert._core, "query_backend", lambda device: asked.append(device) or "some")
    assert megatron._have_flashinfer_routed_nvfp4() is True and megatron.require_flashinfer_routed_nvfp4() is None
    monkeypatch.setattr(hexpert._core, "query_backend", query)
    assert megatron._have_flashinfer_routed_nvfp4() is False
    with pytest.raises(hexpert.UnsupportedError, match="no backend"):
        megatron.require_flashinfer_routed_nvfp4()
    assert asked == [device] * 4


def test_signatures():
    def text(function):
        return [
            (p.name, p.kind.name, p.default) for p in inspect.signature(function).parameters.values()
        ]

    positional, keyword, none = "POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY", inspect.Parameter.empty
    assert text(megatron.prepare_routed_nvfp4_weights) == [
        ("fc1_weight", positional, none),
        ("fc2_weight", positional, none),
        ("out", positional, None),
    ]
    assert text(megatron.quantize_routed_nvfp4_input) == [
        ("hidden_states", positional, none),
        ("padded_hidden_size", positional, none),
    ]
    assert text(megatron.flashinfer_routed_nvfp4_moe) == [
        *[(name, positional, none) for name in ("hidden_states", "routing_map", "probabilities", "weights")],
        *[(name, keyword, none) for name in ("num_experts", "local_expert_offset", "activation_type")],
        ("out", keyword, None),
        ("token_capacity", keyword, None),
        ("use_bounded_rows", keyword, False),
    ]
    assert [f.name for f in dataclasses.fields(megatron.FlashInferRoutedNVFP4Weights)] == FIELDS


def test_takes_the_place_of_their_module(tmp_path):
    package = tmp_path / "megatron" / "core" / "inference" / "moe"
    package.mkdir(parents=True)
    (package / "flashinfer_nvfp4.py").write_text("raise ImportError('FlashInfer has no kernels for this device')")
    (package / "caller.py").write_text(
        "from megatron.core.inference.moe import flashinfer_nvfp4\n"
        "from megatron.core.inference.moe.flashinfer_nvfp4 import FlashInferRoutedNVFP4Weights\n"
    )
    code = (
        "import sys, hexpert.megatron\n"
        'sys.modules["megatron.core.inference.moe.flashinfer_nvfp4"] = hexpert.megatron\n'
        "from megatron.core.inference.moe import caller\n"
        "assert caller.flashinfer_nvfp4 is hexpert.megatron\n"
        "assert caller.FlashInferRoutedNVFP4Weights is hexpert.megatron.FlashInferRoutedNVFP4Weights\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": path})


@pytest.mark.parametrize("case, golden", golden_cases("weights"))
def test_canonical_bytes(case, golden):
    golden = {name: torch.from_numpy(array) for name, array in golden.items()}
    weights = megatron.prepare_routed_nvfp4_weights(
        golden["fc1_weight"].view(torch.bfloat16), golden["fc2_weight"].view(torch.bfloat16)
    )
    for name in BUFFERS:
        field = getattr(weights, name)
        assert torch.equal(field.reshape(-1).view(torch.uint8), golden[name].reshape(-1).view(torch.uint8)), name
    assert weights.fc2_input_scale.shape == (1,)
    assert weights.fc2_input_scale.view(torch.int32).item() == 0x39C30C31
    assert weights.num_local_experts == len(golden["fc1_alpha"])
    for prefix in ("fc1", "fc2"):
        view, bytes_ = getattr(weights, f"{prefix}_scale"), getattr(weights, f"{prefix}_scale_swizzled")
        experts, rows, columns = bytes_.shape
        assert view.shape == (32, 4, rows // 128, 4, columns // 4, experts)
        assert view.data_ptr() == bytes_.data_ptr() and not view.is_contiguous()
        linear = golden.get(f"{prefix}_scale_linear")
        if linear is not None:
            for e, r, c in ((0, 0, 0), (experts - 1, rows - 1, columns - 1), (1, 77, 3)):
                assert view[r % 32, r % 128 // 32, r // 128, c % 4, c // 4, e] == linear[e, r, c]


@pytest.mark.parametrize("gated", [True, False])
def test_forward(gated):
    fc1, fc2 = stacks(gated)
    weights = megatron.prepare_routed_nvfp4_weights(fc1, fc2)
    assert (weights.hidden_size, weights.intermediate_size, weights.gated) == (80, 104, gated)
    assert (weights.padded_hidden_size, weights.padded_intermediate_size) == (256, 256)
    x, ids, p = inputs()
    kind = megatron.ActivationType.SWIGLU if gated else megatron.ActivationType.SQUARED_RELU
    routing = ROUTING | {"activation_type": kind}
    got = megatron.flashinfer_routed_nvfp4_moe(x, ids, p, weights, **routing)
    want = reference.forward(fc1, fc2, x, ids, p, offset=2)
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).norm() <= 1e-2 * want.norm()
    out = torch.full((9, 80), torch.nan)
    assert megatron.flashinfer_routed_nvfp4_moe(x, ids, p, weights, out=out, **routing) is out
    assert torch.equal(out.bfloat16(), got)
    assert (out[~((ids >= 2) & (ids < 5)).any(1)] == 0).all(), "rows without a local expert are zero"


def test_token_capacity():
    weights = megatron.prepare_routed_nvfp4_weights(*stacks())
    x, ids, p = inputs()

    def run(**options):
        return megatron.flashinfer_routed_nvfp4_moe(x, ids, p, weights, **(ROUTING | options))

    full = run()
    assert torch.equal(run(token_capacity=4), full), "without use_bounded_rows it has no effect"
    assert torch.equal(run(use_bounded_rows=True), full)
    assert torch.equal(run(token_capacity=100, use_bounded_rows=True), full)
    part = run(token_capacity=4, use_bounded_rows=True)
    assert torch.equal(part[:4], full[:4]) and not part[4:].any()
    out = torch.full_like(full, 3)
    run(token_capacity=4, use_bounded_rows=True, out=out)
    assert torch.equal(out[:4], full[:4]) and (out[4:] == 3).all()
    assert megatron.flashinfer_routed_nvfp4_moe(x[:0], ids[:0], p[:0], weights, **ROUTING).shape == (0, 80)


def test_quantize():
    x = inputs()[0]
    data, scales, token_scales = megatron.quantize_routed_nvfp4_input(x, 256)
    want = reference.quantize(reference.padded(x, 9, 256), per_row=True)
    assert data.shape == (9, 128) and scales.shape == (9, 16) and token_scales.shape == (9,)
    assert torch.equal(data, want[0]) and torch.equal(scales, want[1]) and torch.equal(token_scales, want[2])


def test_refresh_keeps_every_address():
    weights = megatron.prepare_routed_nvfp4_weights(*stacks())
    fields = {name: getattr(weights, name) for name in FIELDS[5:]}
    addresses = {name: tensor.data_ptr() for name, tensor in fields.items()}
    new = stacks(seed=5)
    assert megatron.prepare_routed_nvfp4_weights(*new, out=weights) is weights
    fresh = megatron.prepare_routed_nvfp4_weights(*new)
    for name in BUFFERS:
        assert getattr(weights, name) is fields[name] and fields[name].data_ptr() == addresses[name]
        assert torch.equal(fields[name], getattr(fresh, name)), name
    x, ids, p = inputs()
    got, want = (megatron.flashinfer_routed_nvfp4_moe(x, ids, p, w, **ROUTING) for w in (weights, fresh))
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "field, other",
    [
        ("num_local_experts", stacks(experts=2)),
        ("hidden_size", stacks(hidden=96)),
        ("intermediate_size", stacks(inter=96)),
        ("gated", stacks(gated=False)),
    ],
)
def test_refresh_of_other_sizes_writes_nothing(field, other):
    weights = megatron.prepare_routed_nvfp4_weights(*stacks())
    before = [getattr(weights, name).clone() for name in BUFFERS]
    with pytest.raises(ValueError, match=f"{field}: the weights were prepared for"):
        megatron.prepare_routed_nvfp4_weights(*other, out=weights)
    weights.import_fields()
    assert all(torch.equal(a, getattr(weights, name)) for a, name in zip(before, BUFFERS))


def test_made_from_fields():
    weights = megatron.prepare_routed_nvfp4_weights(*stacks())
    copy = megatron.FlashInferRoutedNVFP4Weights(**{name: getattr(weights, name) for name in FIELDS})
    x, ids, p = inputs()
    want = megatron.flashinfer_routed_nvfp4_moe(x, ids, p, weights, **ROUTING)
    assert torch.equal(megatron.flashinfer_routed_nvfp4_moe(x, ids, p, copy, **ROUTING), want)
    with pytest.raises(ValueError, match="padded_hidden_size: expected 256, got 128"):
        dataclasses.replace(weights, padded_hidden_size=128)


def test_fields_that_are_refused():
    weights = megatron.prepare_routed_nvfp4_weights(*stacks())
    fields = {name: getattr(weights, name) for name in FIELDS}
    for name in FIELDS[5:]:
        good = fields[name]
        for error, text, bad in [
            (TypeError, f"{name}: expected a torch.Tensor, got NoneType", None),
            (TypeError, f"{name}: expected a torch.Tensor, got ndarray", good.numpy()),
            (TypeError, f"{name}: expected {good.dtype}, got torch.int32", good.int()),
            (ValueError, f"{name}: expected", good[None].clone()),
        ]:
            with pytest.raises(error, match=re.escape(text)):
                megatron.FlashInferRoutedNVFP4Weights(**(fields | {name: bad}))
    for error, text, bad in [
        (TypeError, "hidden_size: expected an int, got 80.0", dict(hidden_size=80.0)),
        (TypeError, "intermediate_size: expected an int, got None", dict(intermediate_size=None)),
        (ValueError, "hidden_size", dict(hidden_size=-1)),
        (TypeError, "padded_hidden_size: expected an int, got '256'", dict(padded_hidden_size="256")),
        (ValueError, "padded_intermediate_size: expected 256, got 128", dict(padded_intermediate_size=128)),
        (TypeError, "gated: expected True or False, got 1", dict(gated=1)),
        (ValueError, "fc1_data: expected [3, 256, 128], got [3, 512, 128]", dict(gated=False)),
        (ValueError, "fc2_alpha: expected [3], got [2]", dict(fc2_alpha=fields["fc2_alpha"][:2])),
        (ValueError, "fc1_scale: expected a view of fc1_scale_swizzled", dict(fc1_scale=fields["fc1_scale"] + 1)),
        (ValueError, "fc2_input_scale: expected 0.00037", dict(fc2_input_scale=torch.ones(1))),
        (ValueError, "fc2_alpha: expected memory of cpu, got meta", dict(fc2_alpha=fields["fc2_alpha"].to("meta"))),
        (ValueError, "fc2_data: expected a packed tensor", dict(fc2_data=fields["fc2_data"].mT.contiguous().mT)),
    ]:
        with pytest.raises(error, match=re.escape(text)):
            megatron.FlashInferRoutedNVFP4Weights(**(fields | bad))
    made = megatron.FlashInferRoutedNVFP4Weights(**(fields | {"fc1_scale": fields["fc1_scale"].clone()}))
    assert made.fc1_scale.data_ptr() == made.fc1_scale_swizzled.data_ptr()


def test_copies():
    weights = megatron.prepare_routed_nvfp4_weights(*stacks())
    args = inputs()
    want = megatron.flashinfer_routed_nvfp4_moe(*args, weights, **ROUTING)
    copies = [copy.copy(weights), copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))]
    before = weights.fc1_data.clone()
    assert all(torch.equal(one.fc1_data, before) for one in copies)
    megatron.prepare_routed_nvfp4_weights(*stacks(seed=7), out=weights)
    for one in copies:
        assert torch.equal(megatron.flashinfer_routed_nvfp4_moe(*args, one, **ROUTING), want)
        assert torch.equal(one.fc1_data, before) and one.padded_hidden_size == 256


def test_import_fields():
    weights = megatron.prepare_routed_nvfp4_weights(*stacks())
    other = megatron.prepare_routed_nvfp4_weights(*stacks(seed=9))
    for name in BUFFERS:
        getattr(weights, name).copy_(getattr(other, name))
    x, ids, p = inputs()
    want = megatron.flashinfer_routed_nvfp4_moe(x, ids, p, other, **ROUTING)
    assert not torch.equal(megatron.flashinfer_routed_nvfp4_moe(x, ids, p, weights, **ROUTING), want)
    weights.import_fields()
    assert torch.equal(megatron.flashinfer_routed_nvfp4_moe(x, ids, p, weights, **ROUTING), want)


class TheirActivationType(enum.Enum):  # Megatron-Core's
    SQUARED_RELU = "squared_relu"
    SWIGLU = "swiglu"
    GELU = "gelu"


class FlashInferActivationType(enum.IntEnum):
    Swiglu = 3
    Relu2 = 6


def test_activation_names():
    weights = megatron.prepare_routed_nvfp4_weights(*stacks())
    x, ids, p = inputs()

    def run(kind):
        return megatron.flashinfer_routed_nvfp4_moe(x, ids, p, weights, **(ROUTING | {"activation_type": kind}))

    want = run(megatron.ActivationType.SWIGLU)
    for kind in (TheirActivationType.SWIGLU, FlashInferActivationType.Swiglu, 3, hexpert.ActivationType.SWIGLU):
        assert torch.equal(run(kind), want)
    for kind in (TheirActivationType.GELU, hexpert.ActivationType.SITU, 4, True, None):
        with pytest.raises(hexpert.UnsupportedError, match="activation_type: expected squared ReLU or SwiGLU, got"):
            run(kind)
    for kind in (TheirActivationType.SQUARED_RELU, FlashInferActivationType.Relu2, 6):
        with pytest.raises(ValueError, match="activation mismatch"):
            run(kind)


def test_compiles_into_one_graph():
    x, ids, p = inputs()
    args = x, ids, p
    layers = [megatron.prepare_routed_nvfp4_weights(*stacks(seed=seed)) for seed in range(3)]
    run = megatron.flashinfer_routed_nvfp4_moe
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for kind in (FlashInferActivationType.Swiglu, 3, TheirActivationType.SWIGLU, hexpert.ActivationType.SWIGLU):
        routing = ROUTING | {"activation_type": kind}
        assert torch.equal(compiled(*args, layers[0], **routing), run(*args, layers[0], **routing))
    torch.compiler.reset()  # there is a limit to the variants of one function
    for weights in layers:
        want = run(*args, weights, **ROUTING)
        assert torch.equal(compiled(*args, weights, **ROUTING), want)
        part = compiled(*args, weights, **ROUTING, token_capacity=4, use_bounded_rows=True)
        assert torch.equal(part[:4], want[:4]) and not part[4:].any()
        out = torch.full(x.shape, 3.0)
        assert compiled(*args, weights, **ROUTING, out=out, token_capacity=4, use_bounded_rows=True) is out
        assert torch.equal(out[:4].bfloat16(), want[:4]) and (out[4:] == 3).all()
    torch.compiler.reset()
    few = x[:3].clone(), ids[:3].clone(), p[:3].clone()
    assert torch.equal(compiled(*few, layers[0], **ROUTING), run(*few, layers[0], **ROUTING))
    for op, more in ((megatron._moe, ()), (megatron._moe_out, (torch.zeros_like(x),))):
        torch.library.opcheck(op, (*args, *more, layers[0]._number, 6, 2, "SWIGLU", None, False))
    number = layers.pop()._number
    del weights
    torch.compiler.reset()
    gc.collect()
    assert number not in megatron._weights_of


def test_growing_batches_and_routings():
    weights = megatron.prepare_routed_nvfp4_weights(*stacks())
    for tokens in (1, 16, 17, 3, 200):
        for top_k in (1, 2, 6):
            x, ids, p = inputs(tokens, top_k=top_k)
            got = megatron.flashinfer_routed_nvfp4_moe(x, ids, p, weights, **ROUTING)
            one = [
                megatron.flashinfer_routed_nvfp4_moe(
                    x[i : i + 1].clone(), ids[i : i + 1], p[i : i + 1].clone(), weights, **ROUTING
                )
                for i in (0, tokens - 1)
            ]
            assert torch.allclose(got[[0, -1]].float(), torch.cat(one).float(), rtol=1e-2, atol=1e-3)


def test_threads_share_a_plan():
    """Each would keep a workspace of its own, and only one of them would be kept alive."""
    weights = megatron.prepare_routed_nvfp4_weights(*stacks())
    start = threading.Barrier(4)

    def first_layer(_):
        start.wait()
        return weights._layer(9, 2, 6, 2, hexpert.ActivationType.SWIGLU)

    with ThreadPoolExecutor(4) as pool:
        plans = list(pool.map(first_layer, range(4)))
    assert all(plan is plans[0] for plan in plans)


def test_refused():
    fc1, fc2 = stacks()
    weights = megatron.prepare_routed_nvfp4_weights(fc1, fc2)
    x, ids, p = inputs()

    def run(**changed):
        arguments = dict(hidden_states=x, routing_map=ids, probabilities=p, weights=weights) | ROUTING | changed
        return megatron.flashinfer_routed_nvfp4_moe(**arguments)

    run()  # a plan is there already
    for error, text, changed in [
        (TypeError, "weights: expected FlashInferRoutedNVFP4Weights, got None", dict(weights=None)),
        (TypeError, "hidden_states: expected a torch.Tensor, got None", dict(hidden_states=None)),
        (TypeError, "hidden_states: expected bf16, got", dict(hidden_states=x.half())),
        (ValueError, "hidden_states: expected rank 2", dict(hidden_states=x[0])),
        (ValueError, "hidden_states: expected", dict(hidden_states=x[:, :64].clone())),
        (ValueError, "routing_map: expected rank 2", dict(routing_map=ids[0])),
        (ValueError, "top_k: expected >= 1, got 0", dict(routing_map=ids[:, :0])),
        (TypeError, "routing_map: expected i32 or i64", dict(routing_map=ids.short())),
        (TypeError, "probabilities: expected f32", dict(probabilities=p.bfloat16())),
        (ValueError, "num_experts: expected >= 1, got 0", dict(num_experts=0)),
        (ValueError, "local_expert_offset: expected", dict(local_expert_offset=4)),
        *[
            (TypeError, re.escape(f"{name}: expected an int, got {value!r}"), {name: value})
            for name in ("num_experts", "local_expert_offset")
            for value in ([6], 6.0, "6", None)
        ],
        (ValueError, "num_experts: expected an int of 64 bits", dict(num_experts=2**70)),
        (TypeError, "token_capacity: expected an int, got 4.0", dict(token_capacity=4.0)),
        (TypeError, "use_bounded_rows: expected True or False, got 1", dict(use_bounded_rows=1)),
        (ValueError, "token_capacity: expected >= 0", dict(token_capacity=-1)),
        (ValueError, "out: expected", dict(out=torch.empty(3, 80))),
        (ValueError, "out: expected memory that overlaps no input", dict(out=x)),
    ]:
        with pytest.raises(error, match=text):
            run(**changed)
    with pytest.raises(TypeError, match="out: expected FlashInferRoutedNVFP4Weights, got dict"):
        megatron.prepare_routed_nvfp4_weights(fc1, fc2, {})
    with pytest.raises(ValueError, match="multiple of 16"):
        megatron.quantize_routed_nvfp4_input(x, 100)
    with pytest.raises(TypeError, match="padded_hidden_size: expected an int, got '64'"):
        megatron.quantize_routed_nvfp4_input(x, "64")
