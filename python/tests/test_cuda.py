"""torch on a GPU: tensors, streams, graphs, refit, compilation, and what a call costs the host."""

import copy
import gc
import itertools
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import reference  # noqa: E402
from conftest import GROUPS, golden_cases  # noqa: E402

import hexpert  # noqa: E402
import hexpert.megatron as megatron  # noqa: E402
import hexpert.torch  # noqa: E402

if not torch.cuda.is_available() or not any(b.available and b.device == "cuda" for b in hexpert.list_backends()):
    pytest.skip("no GPU that a backend of this build runs on", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
A_WHILE = 100_000_000  # clock cycles: some 50 ms
HOST_MICROSECONDS = 15  # of one forward of one token


class Case:
    """A layer with inputs, on the GPU."""

    def __init__(self, gated=True, experts=8, hidden=256, inter=192, tokens=24, top_k=2, seed=0):
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, device=DEVICE, generator=generator)

        self.fc1 = (normal(experts, (2 if gated else 1) * inter, hidden) / 10).bfloat16()
        self.fc2 = (normal(experts, hidden, inter) / 10).bfloat16()
        self.x = normal(tokens, hidden).bfloat16()
        top, self.ids = normal(tokens, experts).topk(top_k, dim=1)
        self.ids[tokens // 2] = -1
        self.p = top.softmax(1).contiguous()
        self.options = dict(top_k=top_k, max_tokens=tokens)
        torch.cuda.synchronize()

    @property
    def stacks(self):
        return self.fc1, self.fc2

    @property
    def inputs(self):
        return self.x, self.ids, self.p

    def experts(self):
        return hexpert.torch.RoutedExperts(*self.stacks, **self.options)

    def expected(self):
        """FP64 sums of the independent implementation, on the CPU."""
        return reference.forward(*(t.cpu() for t in (*self.stacks, *self.inputs)))


def close(got, want):
    got, want = got.cpu().double(), want.cpu()
    return (got - want).norm() <= 1e-2 * want.norm()


def allocations():
    """How often torch has asked for device memory, and what the driver has left."""
    return torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.mem_get_info()


def captured(run):
    run()  # torch wants a run before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


# --- results ---


@pytest.mark.parametrize("gated", [True, False])
def test_layer(gated):
    case = Case(gated)
    experts = case.experts()
    assert experts.weights.device == "cuda:0" and experts.layer.backend_name.startswith("cuda")
    out = torch.empty(case.x.shape, device=DEVICE)
    assert experts(*case.inputs, out) is out
    assert close(out, case.expected())
    rounded = experts(case.x, case.ids.int(), case.p)
    assert rounded.device == DEVICE and rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, out.bfloat16())
    assert not rounded[12].any(), "a token without experts"


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("num_experts", [256, 384])
def test_accuracy_grid(num_experts, gated):
    """FlashInfer's: the torch implementation runs on the GPU too."""
    case = Case(gated, num_experts, hidden=1024, inter=2048, tokens=1024, top_k=8)
    for tokens, top_k in itertools.product((128, 515, 1024), (1, 2, 8)):
        x, ids = case.x[:tokens], case.ids[:tokens, :top_k].contiguous()
        p = case.p[:tokens, :top_k].contiguous()
        experts = hexpert.torch.RoutedExperts(*case.stacks, top_k=top_k, max_tokens=tokens)
        out = experts(x, ids, p, torch.empty(x.shape, device=DEVICE))
        assert close(out, reference.forward(*case.stacks, x, ids, p)), (tokens, top_k)


def on_gpu(array, bits=False):
    tensor = torch.from_numpy(array).to(DEVICE)
    return tensor.view(torch.bfloat16) if bits else tensor


@pytest.mark.parametrize("case, golden", golden_cases("moe"))
def test_golden_layer(case, golden):
    stacks = GROUPS["weights"]["gated_e2_i192_h80" if case == "gated" else "relu2_e3_i96_h64"]
    num_experts, offset, _, top_k, _ = golden["config"].tolist()
    experts = hexpert.torch.RoutedExperts(
        on_gpu(stacks["fc1_weight"], True),
        on_gpu(stacks["fc2_weight"], True),
        top_k=top_k,
        max_tokens=16,
        num_experts=num_experts,
        local_expert_offset=offset,
    )
    x, ids, p = on_gpu(golden["hidden_states"], True), on_gpu(golden["routing_map"]), on_gpu(golden["probabilities"])
    want = on_gpu(golden["output_bf16"], True)
    assert torch.equal(experts(x, ids, p), want)
    assert torch.equal(experts(x, ids.long(), p), want)


@pytest.mark.parametrize("case, golden", golden_cases("weights"))
def test_golden_weights(case, golden):
    weights = hexpert.ExpertWeights.prepare(on_gpu(golden["fc1_weight"], True), on_gpu(golden["fc2_weight"], True))
    for name, array in weights.export_canonical().items():
        want = golden["fc1_alpha" if name == "fc1_gate_alpha" else name]
        assert array.tobytes() == want.tobytes(), name
    like = torch.empty(0, device=DEVICE)
    assert all(tensor.is_cpu for tensor in weights.export_canonical(like=like).values())
    for matrix in (hexpert.Projection.UP, hexpert.Projection.DOWN):
        got, want = weights.export_projection(0, matrix, like=like), weights.export_projection(0, matrix)
        assert all(a.is_cpu and a.numpy().tobytes() == b.tobytes() for a, b in zip(got[:2], want))
    copied = copy.deepcopy(weights)
    assert copied.device == weights.device
    for name, array in copied.export_canonical().items():
        want = golden["fc1_alpha" if name == "fc1_gate_alpha" else name]
        assert array.tobytes() == want.tobytes(), name


@pytest.mark.parametrize("case, golden", golden_cases("per_token"))
def test_golden_tokens(case, golden):
    x = on_gpu(golden["x"], True)
    codes, scales, outer = hexpert.quantize_tokens(x, 2 * golden["data"].shape[1])
    for got, name in ((codes, "data"), (scales, "scale_linear"), (outer, "row_scale")):
        assert got.device == DEVICE and got.cpu().numpy().tobytes() == golden[name].tobytes(), name


def test_nothing_is_copied():
    """Inputs are read where they are, and `out` is written where it is: parts of larger tensors here."""
    case = Case()
    layer = case.experts().layer
    want = layer.forward(*case.inputs)
    x = torch.full((3, *case.x.shape), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    x[1] = case.x
    memory = torch.full_like(x, torch.nan)
    out, address = memory[1], memory[1].data_ptr()
    before = allocations()
    assert layer.forward(x[1], case.ids, case.p, out) is out
    assert allocations() == before
    assert out.data_ptr() == address and torch.equal(memory[1], want)
    assert memory[0].isnan().all() and memory[2].isnan().all()

    codes, scales, outer = hexpert.quantize_tokens(case.x)
    addresses = [t.data_ptr() for t in (codes, scales, outer)]
    copies = [t.clone() for t in (codes, scales, outer)]
    for tensor in (codes, scales, outer):
        tensor.fill_(7)
    again = hexpert.quantize_tokens(case.x, out=(codes, scales, outer))
    assert [t.data_ptr() for t in again] == addresses
    assert all(torch.equal(a, b) for a, b in zip(again, copies))


def test_bounded_rows():
    case = Case()
    experts = case.experts()
    full = experts(*case.inputs)
    bounded = dict(token_capacity=9, use_bounded_rows=True)
    part = experts.layer.forward(*case.inputs, **bounded)
    assert torch.equal(part[:9], full[:9]) and not part[9:].any()
    out = torch.full_like(full, 5)
    experts.layer.forward(*case.inputs, out, **bounded)
    assert torch.equal(out[:9], full[:9]) and (out[9:] == 5).all()
    empty = experts(case.x[:0], case.ids[:0], case.p[:0])
    assert empty.shape == (0, 256) and empty.device == DEVICE


# --- streams ---


def test_work_goes_to_the_current_stream():
    """Behind what was enqueued there before, and before what comes after it; nothing else waits."""
    case, other = Case(tokens=512), Case(tokens=512, seed=1)
    experts = case.experts()
    want = experts(*case.inputs)
    assert not torch.equal(want, experts(*other.inputs))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        inputs = [tensor.clone() for tensor in other.inputs]
        torch.cuda._sleep(A_WHILE)
        for tensor, new in zip(inputs, case.inputs):
            tensor.copy_(new)  # later than the sleep: a call on another stream would read the old values
        made = experts(*inputs)
        copied = made.clone()
        for tensor, new in zip(inputs, other.inputs):
            tensor.copy_(new)
        assert not stream.query(), "the call does not wait"
    assert torch.cuda.current_stream().query(), "the default stream has nothing to do"
    stream.synchronize()
    assert torch.equal(made, want) and torch.equal(copied, want)


def test_stream_by_hand():
    case = Case()
    experts = case.experts()
    want = experts(*case.inputs)
    stream, out = torch.cuda.Stream(), torch.full_like(want, torch.nan)
    assert out.isnan().all()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(A_WHILE)
    experts.layer.forward(*case.inputs, out, stream=stream.cuda_stream)
    assert not stream.query() and out.isnan().all(), "it waits in the stream that was named"
    stream.synchronize()
    assert torch.equal(out, want)


def test_refresh_goes_to_the_current_stream():
    case, other = Case(), Case(seed=1)
    experts = case.experts()
    want = other.experts()(*case.inputs)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stacks = [tensor.clone() for tensor in case.stacks]
        torch.cuda._sleep(A_WHILE)
        for tensor, new in zip(stacks, other.stacks):
            tensor.copy_(new)
        experts.refresh(*stacks)
        out = experts(*case.inputs)
        quantized = hexpert.quantize_tokens(case.x)
        assert not stream.query()
    stream.synchronize()
    assert torch.equal(out, want)
    assert all(torch.equal(a, b) for a, b in zip(quantized, hexpert.quantize_tokens(case.x)))


def test_stacks_of_the_host_refresh_in_the_current_stream():
    """The stacks have no stream: that of the weights' device counts. It waits, for the stacks may go."""
    case, other = Case(), Case(seed=1)
    experts = case.experts()
    old, new = experts(*case.inputs), other.experts()(*case.inputs)
    host = [tensor.cpu() for tensor in other.stacks]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(A_WHILE)
        before = experts(*case.inputs)
        experts.refresh(*host)
        after = experts(*case.inputs)
        torch.cuda.synchronize()
    assert torch.equal(before, old) and torch.equal(after, new)


def test_threads_and_streams():
    case = Case(tokens=256)
    want = case.experts()(*case.inputs)
    torch.cuda.synchronize()

    def work(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            experts = case.experts()
            return [torch.equal(experts(*case.inputs), want) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [[True] * 20] * 4


def test_threads_share_weights_and_a_layer():
    case = Case()
    experts = case.experts()
    want = experts(*case.inputs)
    second = hexpert.RoutedMoe.create(experts.weights, num_experts=8, **case.options)
    torch.cuda.synchronize()

    def work(layer):
        return [torch.equal(layer.forward(*case.inputs), want) for _ in range(50)]

    # All on the default stream, which orders their use of the one workspace.
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, (experts.layer, experts.layer, second))) == [[True] * 50] * 3


# --- graphs ---


@pytest.mark.parametrize("given", [True, False], ids=["out", "new"])
def test_graph_follows_inputs_routing_and_weights(given):
    case, other = Case(), Case(seed=1)
    experts = case.experts()
    memory = torch.empty_like(case.x)
    graph, out = captured(lambda: experts(*case.inputs, memory if given else None))
    assert (out is memory) == given
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, experts(*case.inputs))
    for changed in range(3):
        case.inputs[changed].copy_(other.inputs[changed])
        graph.replay()
        assert torch.equal(out, experts(*case.inputs)), ("hidden_states", "routing_map", "probabilities")[changed]
    nowhere = torch.full_like(case.ids, -1)
    one_expert = nowhere.clone()
    one_expert[:, 0] = 5
    for routing in (nowhere, one_expert, case.ids.flip(0)):
        case.ids.copy_(routing)
        graph.replay()
        assert torch.equal(out, experts(*case.inputs)), "another routing"
    experts.refresh(*other.stacks)
    graph.replay()
    assert torch.equal(out, other.experts()(*case.inputs)), "other weights, in place"
    experts.weights.set_expert(int(case.ids[0, 0]), other.fc1[3], other.fc2[3])
    before = out.clone()
    graph.replay()
    assert torch.equal(out, experts(*case.inputs)) and not torch.equal(out, before), "one other expert"


def test_refit_in_the_graph():
    case, other = Case(), Case(seed=1)
    experts = case.experts()
    out = torch.empty_like(case.x)

    def run():
        experts.refresh(*case.stacks)
        experts(*case.inputs, out)

    graph, _ = captured(run)
    for tensor, new in zip(case.stacks, other.stacks):
        tensor.copy_(new)
    graph.replay()
    assert torch.equal(out, other.experts()(*case.inputs))


def test_graph_of_two_layers():
    """Layers of one model: the second reads what the first wrote, and they share a workspace."""
    first, second = Case(), Case(seed=1)
    weights = [hexpert.ExpertWeights.prepare(*case.stacks) for case in (first, second)]
    options = first.options | dict(num_experts=8)
    size = max(hexpert.RoutedMoe.workspace_bytes_for(w, **options) for w in weights)
    workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    layers = [hexpert.RoutedMoe.create(w, workspace=workspace, **options) for w in weights]

    def run():
        return layers[1].forward(layers[0].forward(*first.inputs), second.ids, second.p)

    want = second.experts()(first.experts()(*first.inputs), second.ids, second.p)
    graph, out = captured(run)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, want)


# --- compilation ---


class Block(torch.nn.Module):
    def __init__(self, case):
        super().__init__()
        self.router = torch.nn.Linear(case.x.shape[1], len(case.fc1), bias=False, device=DEVICE, dtype=torch.bfloat16)
        self.experts = case.experts()

    def forward(self, x, out=None):
        p, ids = self.router(x).float().softmax(-1).topk(2)
        if out is None:
            return self.experts(2 * x, ids, p) + x
        self.experts(2 * x, ids, p, out)
        return out + x


@torch.no_grad()
@pytest.mark.parametrize("given", [True, False], ids=["out", "new"])
def test_compile_without_graph_breaks(given):
    torch.manual_seed(0)
    case = Case()
    block = Block(case)
    memory = torch.empty_like(case.x) if given else None
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for x in (case.x, case.x.flip(0).contiguous()):
        assert torch.equal(compiled(x, memory), block(x, memory))


@torch.no_grad()
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])  # the latter replays graphs of its own
def test_compile_with_the_default_backend(mode):
    pytest.importorskip("triton")
    case, other = Case(), Case(seed=1)
    experts = case.experts()
    compiled = torch.compile(experts, fullgraph=True, mode=mode)
    for inputs in (case.inputs, other.inputs) * 2:
        want = experts(*inputs)
        assert torch.equal(compiled(*inputs), want)


def test_custom_op_is_well_formed():
    case = Case()
    experts = case.experts()
    number = experts._number
    torch.library.opcheck(torch.ops.hexpert.routed_moe.default, (*case.inputs, number))
    torch.library.opcheck(torch.ops.hexpert.routed_moe_out.default, (*case.inputs, torch.empty_like(case.x), number))


# --- Megatron's names ---

FIELDS = ("fc1_data", "fc1_scale_swizzled", "fc1_alpha", "fc2_data", "fc2_scale_swizzled", "fc2_alpha")
ROUTING = dict(num_experts=8, local_expert_offset=0, activation_type=megatron.ActivationType.SWIGLU)


def test_megatron():
    case = Case(hidden=80, inter=104)
    weights = megatron.prepare_routed_nvfp4_weights(*case.stacks)
    assert not set(FIELDS) & set(vars(weights)), "fields are made when they are read"
    got = megatron.flashinfer_routed_nvfp4_moe(*case.inputs, weights, **ROUTING)
    assert close(got, case.expected()) and not set(FIELDS) & set(vars(weights))
    want = megatron.prepare_routed_nvfp4_weights(*(t.cpu() for t in case.stacks))
    for name in FIELDS:
        field = getattr(weights, name)
        assert field.device == DEVICE and torch.equal(field.cpu(), getattr(want, name)), name
    assert weights.fc1_scale.data_ptr() == weights.fc1_scale_swizzled.data_ptr()
    assert weights.fc2_input_scale.device == DEVICE
    out = torch.full_like(got, 5)
    bounded = dict(out=out, token_capacity=9, use_bounded_rows=True)
    assert megatron.flashinfer_routed_nvfp4_moe(*case.inputs, weights, **bounded, **ROUTING) is out
    assert torch.equal(out[:9], got[:9]) and (out[9:] == 5).all()
    data, scales, token_scales = megatron.quantize_routed_nvfp4_input(case.x, 256)
    cpu = megatron.quantize_routed_nvfp4_input(case.x.cpu(), 256)
    assert all(torch.equal(a.cpu(), b) for a, b in zip((data, scales, token_scales), cpu))
    megatron.require_flashinfer_routed_nvfp4()


def test_megatron_refresh():
    case, other = Case(), Case(seed=1)
    fresh = megatron.prepare_routed_nvfp4_weights(*other.stacks)
    want = megatron.flashinfer_routed_nvfp4_moe(*case.inputs, fresh, **ROUTING)
    for read in (False, True):  # the canonical fields, before the refresh
        weights = megatron.prepare_routed_nvfp4_weights(*case.stacks)
        addresses = [getattr(weights, name).data_ptr() for name in FIELDS] if read else None
        graph, out = captured(lambda w=weights: megatron.flashinfer_routed_nvfp4_moe(*case.inputs, w, **ROUTING))
        assert megatron.prepare_routed_nvfp4_weights(*other.stacks, out=weights) is weights
        assert bool(set(FIELDS) & set(vars(weights))) == read
        graph.replay()
        assert torch.equal(out, want)
        for name in FIELDS:
            assert torch.equal(getattr(weights, name), getattr(fresh, name)), name
        assert not read or addresses == [getattr(weights, name).data_ptr() for name in FIELDS]
    copy = megatron.FlashInferRoutedNVFP4Weights(
        **{
            name: getattr(weights, name)
            for name in megatron.FlashInferRoutedNVFP4Weights.__dataclass_fields__
        }
    )
    assert torch.equal(megatron.flashinfer_routed_nvfp4_moe(*case.inputs, copy, **ROUTING), want)


# --- refusals ---


def refusals(case):
    """What is wrong, the arguments, the exception, its text."""
    x, ids, p = case.inputs
    out = torch.full_like(x, 5)
    mismatch = "expected memory of cuda:0, got cpu"
    yield (x.cpu(), ids, p, out), ValueError, f"hidden_states: {mismatch}"
    yield (x, ids.cpu(), p, out), ValueError, f"routing_map: {mismatch}"
    yield (x, ids, p.cpu(), out), ValueError, f"probabilities: {mismatch}"
    yield (x, ids, p, out.cpu()), ValueError, f"out: {mismatch}"
    yield (x.float().cpu().numpy(), ids, p, out), TypeError, "hidden_states: expected bf16, got [24, 256] f32"
    yield (x.half(), ids, p, out), TypeError, "hidden_states: expected bf16, got [24, 256] f16"
    yield (x, ids.short(), p, out), TypeError, "routing_map: expected i32 or i64, got [24, 2] i16"
    yield (x, ids, p.double(), out), TypeError, "probabilities: expected f32, got [24, 2] f64"
    yield (x, ids, p, out.half()), TypeError, "out: expected bf16 or f32, got [24, 256] f16"
    yield (x, None, p, out), TypeError, "routing_map: expected an array of i32 or i64"
    yield (x.t().contiguous().t(), ids, p, out), ValueError, "hidden_states: expected packed rows"
    yield (x[::2], ids[::2], p[::2], out[::2]), ValueError, "hidden_states: expected packed rows"
    yield (x, ids.t().contiguous().t(), p, out), ValueError, "routing_map: expected packed rows"
    yield (x, ids, p, out.t().contiguous().t()), ValueError, "out: expected packed rows"
    yield (x, ids[:5], p, out), ValueError, "routing_map: expected [24, 2], got [5, 2]"
    yield (x, ids, p, out[:5]), ValueError, "out: expected [24, 256], got [5, 256]"
    yield (x, ids, p, x), ValueError, "out: expected memory that overlaps no input"
    yield (x.to("meta"), ids, p, out), ValueError, "hidden_states: expected memory of cpu or cuda, got meta"


def test_refused():
    case = Case()
    experts = case.experts()
    want = experts(*case.inputs)
    for arguments, error, text in refusals(case):
        with pytest.raises(error, match=re.escape(text)):
            experts.layer.forward(*arguments)
        out = arguments[3]
        if out is not case.x:
            assert (out == 5).all(), f"a refused call wrote: {text}"
    for tokens in (case.x.float(), case.x.half()):
        with pytest.raises(TypeError, match="hidden_states: expected bf16"):
            hexpert.quantize_tokens(tokens)
    with pytest.raises(ValueError, match="memory of cuda:0"):
        hexpert.quantize_tokens(case.x, out=tuple(t.cpu() for t in hexpert.quantize_tokens(case.x)))
    with pytest.raises(ValueError, match="prepared for|fc1_weight: expected"):
        experts.refresh(case.fc1[:4], case.fc2[:4])
    with pytest.raises(ValueError, match="device|memory"):
        hexpert.ExpertWeights.prepare(*(t.cpu() for t in case.stacks)).refresh(*case.stacks)
    with pytest.raises((RuntimeError, ValueError), match="cuda:63"):
        hexpert.ExpertWeights.prepare(*case.stacks, device="cuda:63")
    assert torch.equal(experts(*case.inputs), want), "it works on"


def test_out_of_memory():
    case = Case()
    weights = hexpert.ExpertWeights.prepare(*case.stacks)
    free = torch.cuda.mem_get_info()[0]
    with pytest.raises(MemoryError, match="bytes on cuda:0"):
        hexpert.RoutedMoe.create(weights, max_tokens=1 << 27, top_k=2, num_experts=8)
    assert torch.cuda.mem_get_info()[0] == free
    assert torch.isfinite(case.experts()(*case.inputs)).all()


# --- lifetime and cost ---


def test_freed_in_any_order_with_work_in_flight():
    case = Case(tokens=256)
    want = case.experts()(*case.inputs)
    torch.cuda.synchronize()
    for order in range(6):
        experts = case.experts()
        inputs = [tensor.clone() for tensor in case.inputs]
        torch.cuda._sleep(A_WHILE // 10)
        out = experts(*inputs)
        held = [experts.layer, experts.weights, inputs]
        del experts, inputs
        for place in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))[order]:
            held[place] = None
            gc.collect()
            torch.empty(case.x.shape, dtype=case.x.dtype, device=DEVICE).fill_(torch.nan)
        assert torch.equal(out, want)


def test_nothing_leaks():
    case = Case()
    layers = len(hexpert.torch._layers)
    for i in range(40):
        experts = case.experts()
        experts(*case.inputs)
        with pytest.raises(ValueError):
            experts(case.x, case.ids.cpu(), case.p)
        del experts
        if i == 4:
            gc.collect()
            torch.cuda.synchronize()
            before = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
    gc.collect()
    torch.cuda.synchronize()
    assert (torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()) == before
    assert len(hexpert.torch._layers) == layers


def host_microseconds(call, calls=500):  # fewer than the driver queues
    """Median and 90th percentile of one call, with room in the GPU's queue."""
    times = []
    for i in range(calls):
        if i % 50 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    torch.cuda.synchronize()
    return statistics.median(times), statistics.quantiles(times, n=10)[-1]


def test_host_time_and_allocations(capsys):
    case = Case(tokens=1)
    case.ids.copy_(torch.tensor([[1, 3]]))
    experts = case.experts()
    layer = experts.layer
    weights = megatron.prepare_routed_nvfp4_weights(*case.stacks)
    out = torch.empty_like(case.x)
    x, ids, p = case.inputs
    nothing = x[:0], ids[:0], p[:0], out[:0]
    calls = {
        "forward with out": lambda: layer.forward(x, ids, p, out),
        "forward": lambda: layer.forward(x, ids, p),
        "torch module with out": lambda: experts(x, ids, p, out),
        "torch module": lambda: experts(x, ids, p),
        "megatron with out": lambda: megatron.flashinfer_routed_nvfp4_moe(x, ids, p, weights, out=out, **ROUTING),
        "checks, no launches": lambda: layer.forward(x, ids, p, out, token_capacity=0, use_bounded_rows=True),
        "no tokens": lambda: layer.forward(*nothing),
    }
    times = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        before = allocations()
        times[name] = host_microseconds(call)
        if name.endswith("with out"):
            assert allocations() == before, f"{name} allocated device memory"
        assert torch.cuda.mem_get_info() == before[1], f"{name} took memory from the driver"
    with capsys.disabled():
        print("\nhost time of one call, us: median, 90th percentile (1 token)")
        for name, (median, high) in times.items():
            print(f"  {name:24}{median:8.2f}{high:8.2f}")
    assert times["forward with out"][0] <= HOST_MICROSECONDS
    assert times["forward"][0] <= HOST_MICROSECONDS
