"""On a GPU: tensors, streams, graphs, refit, compilation, and what a call costs the host."""

import threading
import time

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


class Case:
    def __init__(self, gated=True, experts=8, hidden=256, inter=192, tokens=24, top_k=2, seed=0):
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, device=DEVICE, generator=generator)

        self.fc1 = (normal(experts, (2 if gated else 1) * inter, hidden) / 10).bfloat16()
        self.fc2 = (normal(experts, hidden, inter) / 10).bfloat16()
        self.x = normal(tokens, hidden).bfloat16()
        top, self.ids = normal(tokens, experts).topk(top_k, dim=1)
        self.p = top.softmax(1).contiguous()
        self.options = dict(top_k=top_k, max_tokens=tokens)
        self.inputs = self.x, self.ids, self.p

    def experts(self):
        return hexpert.torch.RoutedExperts(self.fc1, self.fc2, **self.options)


@pytest.mark.parametrize("gated", [True, False])
def test_layer(gated):
    case = Case(gated)
    experts = case.experts()
    assert experts.weights.device == "cuda:0" and experts.layer.backend_name.startswith("cuda")
    out = torch.empty(case.x.shape, device=DEVICE)
    experts(*case.inputs, out)
    want = reference.forward(*(t.cpu() for t in (case.fc1, case.fc2, *case.inputs)))
    assert (out.cpu().double() - want).norm() <= 1e-2 * want.norm()
    rounded = experts(case.x, case.ids.int(), case.p)
    assert rounded.device == DEVICE and torch.equal(rounded, out.bfloat16())


@pytest.mark.parametrize("case, golden", golden_cases("moe"))
def test_golden_layer(case, golden):
    stacks = GROUPS["weights"]["gated_e2_i192_h80" if case == "gated" else "relu2_e3_i96_h64"]
    num_experts, offset, _, top_k, _ = golden["config"].tolist()

    def on_gpu(array, bits=False):
        tensor = torch.from_numpy(array).to(DEVICE)
        return tensor.view(torch.bfloat16) if bits else tensor

    experts = hexpert.torch.RoutedExperts(
        on_gpu(stacks["fc1_weight"], True),
        on_gpu(stacks["fc2_weight"], True),
        top_k=top_k,
        max_tokens=16,
        num_experts=num_experts,
        local_expert_offset=offset,
    )
    got = experts(on_gpu(golden["hidden_states"], True), on_gpu(golden["routing_map"]), on_gpu(golden["probabilities"]))
    assert torch.equal(got, on_gpu(golden["output_bf16"], True))


@pytest.mark.parametrize("case, golden", golden_cases("per_token"))
def test_golden_tokens(case, golden):
    x = torch.from_numpy(golden["x"]).to(DEVICE).view(torch.bfloat16)
    codes, scales, outer = hexpert.quantize_tokens(x, 2 * golden["data"].shape[1])
    for got, name in ((codes, "data"), (scales, "scale_linear"), (outer, "row_scale")):
        assert torch.equal(got.cpu().view(torch.uint8), torch.from_numpy(golden[name]).view(torch.uint8)), name


def test_other_streams():
    """Work goes to the current stream: what was enqueued there before it is seen, nothing else waits."""
    case = Case(tokens=2048)
    experts = case.experts()
    want = experts(*case.inputs)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros_like(case.x)
        out = torch.empty_like(want)
        torch.cuda._sleep(50_000_000)
        x.copy_(case.x)
        experts(x, case.ids, case.p, out)
        assert not stream.query(), "the call does not wait"
    assert torch.cuda.current_stream().query(), "the default stream has nothing to do"
    stream.synchronize()
    assert torch.equal(out, want)
    by_hand = torch.empty_like(want)
    experts.layer.forward(*case.inputs, by_hand, stream=stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(by_hand, want)


def test_graph_and_refit():
    case, other = Case(), Case(seed=1)
    experts = case.experts()
    out = torch.empty_like(case.x)
    experts(*case.inputs, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts(*case.inputs, out)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, experts(*case.inputs))
    case.ids.copy_(other.ids)
    case.x.copy_(other.x)
    case.p.copy_(other.p)
    graph.replay()
    assert torch.equal(out, experts(*other.inputs)), "changed inputs"
    experts.refresh(other.fc1, other.fc2)
    graph.replay()
    assert torch.equal(out, other.experts()(*other.inputs)), "changed weights"


def test_refit_in_the_graph():
    case, other = Case(), Case(seed=1)
    experts = case.experts()
    out = torch.empty_like(case.x)
    experts.refresh(case.fc1, case.fc2)
    experts(*case.inputs, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts.refresh(case.fc1, case.fc2)
        experts(*case.inputs, out)
    case.fc1.copy_(other.fc1)
    case.fc2.copy_(other.fc2)
    graph.replay()
    assert torch.equal(out, other.experts()(*case.inputs))


def test_compile():
    case = Case()
    experts = case.experts()
    compiled = torch.compile(experts, fullgraph=True)
    assert torch.equal(compiled(*case.inputs), experts(*case.inputs))


def test_megatron():
    case = Case(hidden=80, inter=104)
    weights = megatron.prepare_routed_nvfp4_weights(case.fc1, case.fc2)
    want = megatron.prepare_routed_nvfp4_weights(case.fc1.cpu(), case.fc2.cpu())
    for name in ("fc1_data", "fc1_scale_swizzled", "fc1_alpha", "fc2_data", "fc2_scale_swizzled", "fc2_alpha"):
        field = getattr(weights, name)
        assert field.device == DEVICE and torch.equal(field.cpu(), getattr(want, name)), name
    options = dict(num_experts=8, local_expert_offset=0, activation_type="swiglu")
    got = megatron.flashinfer_routed_nvfp4_moe(*case.inputs, weights, **options)
    expected = reference.forward(*(t.cpu() for t in (case.fc1, case.fc2, *case.inputs)))
    assert (got.cpu().double() - expected).norm() <= 1e-2 * expected.norm()
    out = torch.full_like(got, 5)
    megatron.flashinfer_routed_nvfp4_moe(
        *case.inputs, weights, out=out, token_capacity=9, use_bounded_rows=True, **options
    )
    assert torch.equal(out[:9], got[:9]) and (out[9:] == 5).all()
    megatron.require_flashinfer_routed_nvfp4()


def test_refused():
    case = Case()
    experts = case.experts()
    for arguments in [(case.x.cpu(), case.ids, case.p), (case.x, case.ids.cpu(), case.p)]:
        with pytest.raises(ValueError, match="device mismatch"):
            experts(*arguments)
    with pytest.raises(ValueError, match="device mismatch"):
        experts(*case.inputs, torch.empty(case.x.shape))
    with pytest.raises(ValueError, match="device mismatch|prepared for"):
        hexpert.ExpertWeights.prepare(case.fc1.cpu(), case.fc2.cpu()).refresh(case.fc1, case.fc2)


def test_threads_and_streams():
    case = Case(tokens=256)
    want = case.experts()(*case.inputs)
    torch.cuda.synchronize()
    wrong = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            experts = case.experts()
            for _ in range(20):
                if not torch.equal(experts(*case.inputs), want):
                    wrong.append(experts)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_host_time_and_allocations():
    case = Case(tokens=1)
    layer = case.experts().layer
    out = torch.empty_like(case.x)
    times = []
    before = None
    for _ in range(20):
        torch.cuda.synchronize()
        before = before or torch.cuda.mem_get_info()
        start = time.perf_counter()
        for _ in range(50):
            layer.forward(*case.inputs, out)
        times.append((time.perf_counter() - start) / 50 * 1e6)
    assert torch.cuda.mem_get_info() == before, "a forward allocated device memory"
    best = min(times)
    print(f"one forward costs the host {best:.1f} us")
    assert best <= 15
