"""cupy and jax on a GPU: the golden bits, zero copy, streams, and arrays of several frameworks in one call."""

import re

import numpy as np
import pytest
from conftest import GROUPS

import hexpert

if not any(b.available and b.device == "cuda" for b in hexpert.list_backends()):
    pytest.skip("no GPU that a backend of this build runs on", allow_module_level=True)

STACKS = GROUPS["weights"]["gated_e2_i192_h80"]
GOLDEN = GROUPS["moe"]["gated"]
INPUTS = ("hidden_states", "routing_map", "probabilities")


def plan_for(fc1, fc2):
    num_experts, offset, _, top_k, _ = GOLDEN["config"].tolist()
    weights = hexpert.ExpertWeights.prepare(fc1, fc2)
    assert weights.device == "cuda:0"
    return weights, hexpert.RoutedMoe.create(
        weights, max_tokens=16, top_k=top_k, num_experts=num_experts, local_expert_offset=offset
    )


def same_bits(got, name):
    return np.asarray(got).tobytes() == GOLDEN[name].tobytes()


# --- cupy ---


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy", reason="cupy is not installed")


@pytest.fixture
def on_gpu(cupy):
    """The golden layer as cupy arrays: BF16 as its bits."""
    return plan_for(cupy.asarray(STACKS["fc1_weight"]), cupy.asarray(STACKS["fc2_weight"])), [
        cupy.asarray(GOLDEN[name]) for name in INPUTS
    ]


def copy_into(array, source):
    """On the current stream, without a kernel that cupy would have to compile."""
    array.data.copy_from_device_async(source.data, source.nbytes)


def test_cupy(cupy, on_gpu):
    (weights, plan), inputs = on_gpu
    got = plan.forward(*inputs)
    assert isinstance(got, cupy.ndarray) and got.dtype == np.uint16 and same_bits(got.get(), "output_bf16")
    memory = cupy.zeros((3, *got.shape), np.uint16)
    out, address = memory[1], memory[1].data.ptr
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes(), cupy.cuda.runtime.memGetInfo()
    assert plan.forward(*inputs, out) is out and out.data.ptr == address
    assert (pool.used_bytes(), cupy.cuda.runtime.memGetInfo()) == before
    assert same_bits(memory.get()[1], "output_bf16") and not memory.get()[[0, 2]].any()
    wide = cupy.empty(got.shape, np.float32)
    assert plan.forward(*inputs, wide) is wide
    codes, scales, outer = hexpert.quantize_tokens(inputs[0])
    want = hexpert.quantize_tokens(GOLDEN["hidden_states"])
    assert all(isinstance(array, cupy.ndarray) for array in (codes, scales, outer))
    assert all(np.array_equal(a.get(), b) for a, b in zip((codes, scales, outer), want))
    weights.refresh(cupy.asarray(STACKS["fc1_weight"]), cupy.asarray(STACKS["fc2_weight"]))
    assert same_bits(plan.forward(*inputs).get(), "output_bf16")


def test_cupy_ml_dtypes(cupy, on_gpu):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    (_, plan), (x, ids, p) = on_gpu
    try:
        x = x.view(ml_dtypes.bfloat16)
    except (TypeError, ValueError) as error:
        pytest.skip(f"this cupy has no bfloat16: {error}")
    got = plan.forward(x, ids, p)
    assert got.dtype == ml_dtypes.bfloat16 and same_bits(got.view(np.uint16).get(), "output_bf16")


def test_cupy_streams(cupy, on_gpu):
    torch = pytest.importorskip("torch", reason="its sleeping kernel")
    (_, plan), inputs = on_gpu
    plan.forward(*inputs)
    late = [cupy.zeros_like(array) for array in inputs]
    copied = cupy.zeros(GOLDEN["output_bf16"].shape, np.uint16)
    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        torch.cuda._sleep(100_000_000)
        for array, source in zip(late, inputs):
            copy_into(array, source)
        got = plan.forward(*late)
        copy_into(copied, got)
        assert not stream.done, "the call does not wait"
    assert cupy.cuda.Stream.null.done, "the default stream has nothing to do"
    stream.synchronize()
    assert same_bits(got.get(), "output_bf16") and same_bits(copied.get(), "output_bf16")


def test_cupy_graph(cupy, on_gpu):
    (weights, plan), inputs = on_gpu
    out = cupy.empty(GOLDEN["output_bf16"].shape, np.uint16)
    plan.forward(*inputs, out)
    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        plan.forward(*inputs, out)
        graph = stream.end_capture()
        out.data.memset_async(0xFF, out.nbytes)
        graph.launch(stream)
    stream.synchronize()
    assert same_bits(out.get(), "output_bf16")


def test_cupy_refusals(cupy, on_gpu):
    (_, plan), (x, ids, p) = on_gpu
    out = cupy.zeros(x.shape, np.float32)
    for arguments, error, text in [
        ((GOLDEN["hidden_states"], ids, p, out), ValueError, "hidden_states: expected memory of cuda:0, got cpu"),
        ((x, GOLDEN["routing_map"], p, out), ValueError, "routing_map: expected memory of cuda:0, got cpu"),
        ((x, ids, p, np.zeros(x.shape, np.float32)), ValueError, "out: expected memory of cuda:0, got cpu"),
        ((x.view(np.int16), ids, p, out), TypeError, "hidden_states: expected bf16, got"),
        ((x, ids.view(np.float32), p, out), TypeError, "routing_map: expected i32 or i64, got"),
        ((x, ids, p, out.view(np.int32)), TypeError, "out: expected bf16 or f32, got"),
        ((x, ids, p[:, ::-1], out), ValueError, "probabilities: expected packed rows"),
        ((x, ids, p, out[:-1]), ValueError, "out: expected"),
        ((x, ids, p, x), ValueError, "out: expected memory that overlaps no input"),
    ]:
        with pytest.raises(error, match=re.escape(text)):
            plan.forward(*arguments)
    assert not out.get().any()


# --- several frameworks in one call ---


def test_torch_and_cupy(cupy, on_gpu):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    (_, plan), (x, ids, p) = on_gpu
    tensor = torch.from_dlpack(x)
    assert tensor.data_ptr() == x.data.ptr
    out = torch.empty(x.shape, dtype=torch.bfloat16, device="cuda")
    cupy.cuda.runtime.deviceSynchronize()
    assert plan.forward(tensor.view(torch.bfloat16), ids, torch.from_dlpack(p), out) is out
    assert same_bits(out.view(torch.int16).cpu(), "output_bf16")
    out.zero_()
    torch.cuda.synchronize()
    assert plan.forward(x, torch.from_dlpack(ids), p, out) is out
    cupy.cuda.runtime.deviceSynchronize()
    assert same_bits(out.view(torch.int16).cpu(), "output_bf16")


class Exporter:
    """Speaks DLPack and nothing else; remembers the streams that it was asked to be ready for."""

    def __init__(self, tensor):
        self.tensor, self.streams = tensor, []

    def __dlpack__(self, *, stream=None, **keywords):
        self.streams.append(stream)
        return self.tensor.__dlpack__(stream=stream, **keywords)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_exporters_are_told_the_stream():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    _, plan = plan_for(
        *(torch.from_numpy(STACKS[name]).view(torch.bfloat16).cuda() for name in ("fc1_weight", "fc2_weight"))
    )
    x, ids, p = (torch.from_numpy(GOLDEN[name]).cuda() for name in INPUTS)
    x = x.view(torch.bfloat16)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late, out = Exporter(torch.zeros_like(ids)), torch.zeros_like(x)
        torch.cuda._sleep(100_000_000)
        late.tensor.copy_(ids)
        plan.forward(x, late, p, out)
        assert stream.query(), "nobody else knows when the exporter's memory is free again: the call waits"
    assert late.streams == [stream.cuda_stream] and same_bits(out.view(torch.int16).cpu(), "output_bf16")
    for given, told in ((None, 1), (stream.cuda_stream, stream.cuda_stream)):
        first = Exporter(x)
        assert plan.forward(first, ids, p, out, stream=given) is out
        assert first.streams == [told], "1: DLPack's name of the default stream"
    with pytest.raises(TypeError, match="out: expected an array, for none can be made beside Exporter on a GPU"):
        plan.forward(first, ids, p)


# --- jax ---


@pytest.fixture
def jax():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    pytest.importorskip("ml_dtypes")
    if all(device.platform == "cpu" for device in jax.devices()):
        pytest.skip("jax without CUDA")
    return jax


def test_jax(jax):
    import ml_dtypes

    def put(array):
        array = array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array
        return jax.device_put(array, jax.devices()[0])

    _, plan = plan_for(put(STACKS["fc1_weight"]), put(STACKS["fc2_weight"]))
    x, ids, p = (put(GOLDEN[name]) for name in INPUTS)
    got = plan.forward(x, ids, p)
    assert isinstance(got, jax.Array) and got.dtype == jax.numpy.bfloat16 and got.devices() == x.devices()
    assert same_bits(np.asarray(got).view(np.uint16), "output_bf16")
    twice = jax.jit(lambda array: array + array)
    for _ in range(20):  # computed just before, computed with just after, and gone
        got = twice(plan.forward(twice(x) * jax.numpy.bfloat16(0.5), ids, p))
    want = GOLDEN["output_bf16"].view(ml_dtypes.bfloat16)
    assert np.array_equal(np.asarray(got), want + want)
    for array, want in zip(hexpert.quantize_tokens(x), hexpert.quantize_tokens(GOLDEN["hidden_states"])):
        assert isinstance(array, jax.Array) and np.array_equal(np.asarray(array), want)
    with pytest.raises(ValueError, match="out: expected memory that may be written, got a read-only"):
        plan.forward(x, ids, p, jax.numpy.zeros_like(x))
    with pytest.raises(ValueError, match="hidden_states: expected memory of cuda:0, got cpu"):
        plan.forward(GOLDEN["hidden_states"], ids, p)
