"""What is timed and how: models, routings, references and CUDA graphs, as `hexpert bench` has them."""

import gc
import math
import statistics
import time
from dataclasses import dataclass

import torch

COLD_BYTES = 400e6  # several times the L2 cache: what lies between two uses of the same weights
MOST_CALLS = 64  # of one graph
CHECKED_TOKENS = 4
TOLERANCE = 0.02  # relative L2 distance from the reference; BF16 intermediates give 0.003 to 0.006


def element_type(device):
    """BF16; on a CPU, where Triton's interpreter cannot multiply it, float32."""
    return torch.float32 if device == "cpu" else torch.bfloat16


@dataclass(frozen=True)
class Model:
    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    gated: bool  # SwiGLU, rows of the gate first; otherwise squared ReLU

    @property
    def fc1_rows(self):
        return self.intermediate_size * (2 if self.gated else 1)

    @property
    def parameters_per_expert(self):
        return (self.fc1_rows + self.intermediate_size) * self.hidden_size


MODELS = {
    model.name: model
    for model in (
        Model("qwen3-30b-a3b", 128, 8, 2048, 768, True),
        Model("nemotron-3-nano", 128, 6, 2688, 1856, False),
        Model("mixtral-8x7b", 8, 2, 4096, 14336, True),
        Model("deepseek-v3", 256, 8, 7168, 2048, True),
        Model("tiny", 8, 2, 64, 32, True),
        Model("tiny-relu", 40, 3, 96, 160, False),
    )
}


@dataclass
class Call:
    """The inputs of one forward call."""

    hidden_states: torch.Tensor  # BF16 [tokens, hidden_size]
    routing_map: torch.Tensor  # int32 [tokens, top_k]
    probabilities: torch.Tensor  # float32 [tokens, top_k], rows sum to 1
    active_experts: int

    @property
    def tokens(self):
        return self.hidden_states.shape[0]


def random_call(model, routing, tokens, seed, device):
    """Distinct experts for every token: all equally likely, or by Zipf's law with exponent 1.2."""
    generator = torch.Generator(device=device).manual_seed(seed)
    kwargs = {"generator": generator, "device": device}
    popularity = torch.zeros(model.num_experts, device=device)
    if routing == "zipf":
        rank = torch.randperm(model.num_experts, **kwargs) + 1
        popularity = -1.2 * torch.log(rank.float())
    uniform = torch.rand(tokens, model.num_experts, **kwargs).clamp_(1e-7, 1 - 1e-7)
    ids = (popularity - torch.log(-torch.log(uniform))).topk(model.top_k).indices.int()
    probabilities = 0.1 + torch.randint(0, 1000, (tokens, model.top_k), **kwargs) * 1e-3
    probabilities /= probabilities.sum(1, keepdim=True)
    hidden = torch.empty(tokens, model.hidden_size, dtype=element_type(device), device=device)
    hidden.normal_(generator=generator)
    return Call(hidden, ids.contiguous(), probabilities.float().contiguous(), ids.unique().numel())


def copies_of(layer_bytes):
    """Two copies at least: then every call of a graph finds its experts cold."""
    return min(MOST_CALLS // 2, max(2, int(COLD_BYTES / layer_bytes) + 1))


def random_calls(model, routing, tokens, copies, bits_per_weight, seed, device):
    calls = []
    bytes_read = 0.0
    while len(calls) < 2 * copies or (bytes_read < COLD_BYTES and len(calls) < MOST_CALLS):
        calls.append(random_call(model, routing, tokens, seed + len(calls), device))
        bytes_read += bits_per_weight / 8 * model.parameters_per_expert * calls[-1].active_experts
    return calls


def reference_rows(model, call, rows, expert_weights):
    """The layer in float64 for some of the tokens; expert_weights(e) gives the float64 fc1 and fc2 of an expert."""
    hidden = call.hidden_states[rows].double()
    ids = call.routing_map[rows].tolist()
    out = torch.zeros_like(hidden)
    for expert in sorted({e for row in ids for e in row}):
        where = [(t, s) for t, row in enumerate(ids) for s, e in enumerate(row) if e == expert]
        at = torch.tensor([t for t, _ in where], device=hidden.device)
        slot = torch.tensor([s for _, s in where], device=hidden.device)
        fc1, fc2 = expert_weights(expert)
        h = hidden[at] @ fc1.T
        if model.gated:
            gate, up = h.chunk(2, dim=1)
            h = torch.nn.functional.silu(gate) * up
        else:
            h = torch.relu(h).square()
        out.index_add_(0, at, (h @ fc2.T) * call.probabilities[rows][at, slot, None].double())
    return out


def relative_error(model, call, out, expert_weights):
    """Relative L2 distance of up to four tokens, spread over the call, from the reference."""
    count = min(CHECKED_TOKENS, call.tokens)
    rows = sorted({i * (call.tokens - 1) // max(1, count - 1) for i in range(count)})
    expected = reference_rows(model, call, rows, expert_weights)
    error = (out[rows].double() - expected).norm() / expected.norm()
    return float(error)  # NaN for an output that has one


class Graph:
    """Work enqueued once and replayed. On a CPU: the work itself."""

    def __init__(self, enqueue, device):
        self._enqueue = enqueue
        self._graph = None
        if device == "cpu":
            return
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(stream):
                enqueue()  # what a first launch loads
                torch.cuda.synchronize()
                graph.capture_begin()
                try:
                    enqueue()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        torch.cuda.synchronize()
        self._graph = graph

    def replay(self):
        """Seconds of one replay."""
        if self._graph is None:
            start = time.perf_counter()
            self._enqueue()
            return time.perf_counter() - start
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e-3

    def median(self, seconds, fewest=5, most=2000):
        """Median, 90th percentile and number of the replays that fit into `seconds`, after two that warm up."""
        self.replay()
        self.replay()
        samples = []
        start = time.perf_counter()
        while len(samples) < most and (len(samples) < fewest or time.perf_counter() - start < seconds):
            samples.append(self.replay())
        samples.sort()
        return statistics.median(samples), samples[math.ceil(0.9 * len(samples)) - 1], len(samples)
