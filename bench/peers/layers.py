"""The peers: whole layers from BF16 hidden states, a routing map and probabilities to BF16."""

import json
import os

import kernels
import torch
from problem import Graph, copies_of, element_type


class Bf16Weights:
    """fc1 [experts, fc1_rows, hidden_size] and fc2 [experts, hidden_size, intermediate_size], several copies."""

    bits_per_weight = 16

    def __init__(self, model, device, seed):
        layer_bytes = 2 * model.parameters_per_expert * model.num_experts
        generator = torch.Generator(device=device).manual_seed(seed)
        self.copies = []
        for _ in range(copies_of(layer_bytes)):
            shapes = (
                (model.num_experts, model.fc1_rows, model.hidden_size),
                (model.num_experts, model.hidden_size, model.intermediate_size),
            )
            self.copies.append(
                tuple(
                    torch.empty(shape, dtype=element_type(device), device=device).normal_(
                        std=shape[-1] ** -0.5, generator=generator
                    )
                    for shape in shapes
                )
            )

    def expert(self, copy, e):
        fc1, fc2 = self.copies[copy]
        return fc1[e].double(), fc2[e].double()


class TorchLayer:
    """Eager PyTorch: sort, gather, grouped_mm, activation, grouped_mm, weights, back into order, sum."""

    def __init__(self, model, weights, device):
        self.model = model
        self.weights = weights
        self.experts = torch.arange(model.num_experts, dtype=torch.int32, device=device)
        self._grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm

    def variants(self, tokens, calls):
        del tokens, calls
        return {"": self.forward}

    def forward(self, copy, call, out):
        model = self.model
        fc1, fc2 = self.weights.copies[copy]
        ids, order = call.routing_map.flatten().sort()
        ends = torch.searchsorted(ids, self.experts, right=True, out_int32=True)
        h = self._grouped_mm(call.hidden_states[order // model.top_k], fc1.transpose(1, 2), offs=ends)
        if model.gated:
            gate, up = h.chunk(2, dim=1)
            h = torch.nn.functional.silu(gate).mul_(up)
        else:
            h = torch.relu(h).square_()
        y = self._grouped_mm(h, fc2.transpose(1, 2), offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        y = y[back].view(call.tokens, model.top_k, model.hidden_size)
        y.mul_(call.probabilities.to(y.dtype).unsqueeze(2))
        torch.sum(y, dim=1, out=out)


def route_buffers(model, routes, device):
    """Results of FC1, of the activation and of FC2, a row for every route."""
    sizes = (model.fc1_rows, model.intermediate_size, model.hidden_size)
    return [torch.empty(routes, size, dtype=element_type(device), device=device) for size in sizes]


class TritonLayer:
    """The fused MoE kernel of serving engines, in BF16: block-aligned routes, GEMM with gather, activation, GEMM with
    weights, sum. Tiles are chosen for every cell among kernels.TILES, by time."""

    def __init__(self, model, weights, device):
        self.model = model
        self.weights = weights
        self.device = device
        self.choice = ""

    def variants(self, tokens, calls):
        model = self.model
        routes = tokens * model.top_k
        self.h, self.a, self.y = route_buffers(model, routes, self.device)
        self.a.normal_(std=0.5)
        best = None
        for rows, tiles in kernels.tiles_for(routes / model.num_experts).items():
            plan = kernels.Alignment(routes, model.num_experts, rows, self.device)
            times = []
            for gemm in (self._fc1, self._fc2):
                timed = [(self._time(gemm, plan, tile, calls), tile) for tile in tiles]
                times.append(min(timed, key=lambda pair: pair[0]))
            total = sum(t for t, _ in times)
            if best is None or total < best[0]:
                best = (total, plan, times[0][1], times[1][1])
        _, self.plan, self.tile1, self.tile2 = best
        self.choice = f"{self.tile1} {self.tile2}"
        return {"": self.forward}

    def _time(self, gemm, plan, tile, calls):
        pick = calls[: 2 if calls[0].tokens >= 512 else 8]
        plan.run(pick[0].routing_map)
        copies = len(self.weights.copies)

        def enqueue():
            for i, call in enumerate(pick):
                gemm(i % copies, call, plan, tile)

        try:
            graph = Graph(enqueue, self.device)
            graph.replay()
            return min(graph.replay() for _ in range(2))
        except RuntimeError as error:  # a tile that does not fit
            if "CUDA error" in str(error):
                raise
            return float("inf")
        except Exception as error:
            if type(error).__name__ != "OutOfResources":
                raise
            return float("inf")

    def _fc1(self, copy, call, plan, tile):
        kernels.gemm(call.hidden_states, self.weights.copies[copy][0], self.h, plan, self.model.top_k, None, tile)

    def _fc2(self, copy, call, plan, tile):
        kernels.gemm(self.a, self.weights.copies[copy][1], self.y, plan, 1, call.probabilities, tile)

    def forward(self, copy, call, out):
        self.plan.run(call.routing_map)
        self._fc1(copy, call, self.plan, self.tile1)
        kernels.activate(self.h, self.a, self.model.gated)
        self._fc2(copy, call, self.plan, self.tile2)
        kernels.combine(self.y, None, None, out)


# Nibbles of E2M1, the element of NVFP4.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class HummingWeights:
    """Random NVFP4 checkpoints in the layout of ModelOpt, transformed by Humming: any code, block scales around 1."""

    bits_per_weight = 4.5

    def __init__(self, model, device, seed):
        # Kernels want multiples of 128 output rows; what is not one is padded, by little or by the multiples that
        # serving engines use.
        aligned = model.fc1_rows % 128 == 0 and model.hidden_size % 128 == 0
        self.paddings = [(1, 1)] if aligned else [(128, 64), (256, 128)]
        layer_bytes = self.bits_per_weight / 8 * model.parameters_per_expert * model.num_experts
        generator = torch.Generator(device=device).manual_seed(seed)
        self.copies = []  # of pairs of layers, by padding
        self.raw = []  # what copy 0 was made from
        for copy in range(copies_of(layer_bytes)):
            pairs = {padding: [] for padding in self.paddings}
            for rows, cols in (
                (model.fc1_rows, model.hidden_size),
                (model.hidden_size, model.intermediate_size),
            ):
                shape = (model.num_experts, rows)
                random = {"dtype": torch.uint8, "device": device, "generator": generator}
                codes = torch.randint(0, 256, (*shape, cols // 2), **random)
                scales = torch.randint(0x30, 0x40, (*shape, cols // 16), **random)
                outer = torch.full((model.num_experts,), 0.2 * cols**-0.5, device=device)
                if copy == 0:
                    self.raw.append((codes, scales, outer))
                for padding in self.paddings:
                    pairs[padding].append(self._layer(rows, cols, model.num_experts, padding, codes, scales, outer))
            self.copies.append(pairs)
        torch.cuda.synchronize()

    @staticmethod
    def _layer(rows, cols, experts, padding, codes, scales, outer):
        from humming.layer import HummingLayer

        with codes.device:
            layer = HummingLayer(
                shape_n=rows,
                shape_k=cols,
                weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
                pad_n_to_multiple=padding[0],
                pad_k_to_multiple=padding[1],
                num_experts=experts,
                torch_dtype=torch.bfloat16,
            )
        layer.weight.data.copy_(codes)
        layer.weight_scale.data.copy_(scales.view(torch.float8_e4m3fn))
        layer.weight_scale_2.data.copy_(outer.view(layer.weight_scale_2.shape))
        layer.transform()
        return layer

    def expert(self, copy, e):
        assert copy == 0
        return tuple(dequantize(codes[e], scales[e], outer[e]) for codes, scales, outer in self.raw)


def dequantize(codes, scales, outer):
    """float64 [rows, cols] of NVFP4: two elements a byte, low nibble first, a scale for 16 of them, one for all."""
    table = torch.tensor(E2M1, dtype=torch.float64, device=codes.device)
    elements = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), dim=2).flatten(1)
    blocks = scales.view(torch.float8_e4m3fn).double()
    return elements * blocks.repeat_interleave(16, dim=1) * outer.double()


class HummingLayers:
    """Humming's GEMMs, NVFP4 weights and BF16 activations, with the schedule its heuristics give for the device, the
    shape and the number of routes; sorting, activation and sum as for the Triton layer. Both ways of the package are
    timed: `indexed`, which gathers tokens itself, and `grouped`, over tokens that were gathered before."""

    def __init__(self, model, weights, device):
        self.model = model
        self.weights = weights
        self.device = device

    def _kinds(self):
        return [(p, kind) for p in self.weights.paddings for kind in ("indexed", "grouped_contiguous")]

    def schedules(self, tokens):
        """The configurations that the layer needs for a number of tokens: layer, compute and tuning, as JSON."""
        from humming.tune import get_heuristics_config

        routes = tokens * self.model.top_k
        for padding, kind in self._kinds():
            for layer in self.weights.copies[0][padding]:
                tuning = get_heuristics_config(layer.humming_config, shape_m=routes, gemm_type=kind)
                compute = {"use_f16_accum": False, "use_batch_invariant": False, "gemm_type": kind}
                yield (padding, kind), layer.humming_config.to_str(), json.dumps(compute), json.dumps(tuning)

    def compile(self, token_counts):
        """Compiles in parallel whatever the cells will need; what fails is reported by its cell."""
        from concurrent.futures import ThreadPoolExecutor

        from humming.kernel.humming import HummingKernel
        from humming.ops.utils import init_humming_launcher

        init_humming_launcher()
        jobs = {job[1:] for tokens in token_counts for job in self.schedules(tokens)}

        def run(job):
            try:
                HummingKernel.prepare_kernels(*job, device=0)
            except Exception:
                return 1
            return 0

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return len(jobs), sum(pool.map(run, sorted(jobs)))

    def variants(self, tokens, calls):
        del calls
        routes = tokens * self.model.top_k
        self.h, self.a, self.y = route_buffers(self.model, routes, self.device)
        self.x = torch.empty_like(self.y)
        by_kind = {}
        for key, _, compute, tuning in self.schedules(tokens):
            by_kind.setdefault(key, []).append((compute, tuning))
        result = {}
        for (padding, kind), pair in by_kind.items():
            name = kind.split("_")[0] + ("" if padding == (1, 1) else f", padded to {padding[0]}x{padding[1]}")
            make = self._indexed if kind == "indexed" else self._grouped
            result[name] = make(padding, pair, routes)
        return result

    def _indexed(self, padding, pair, routes):
        blocks = [json.loads(tuning)["block_shape"][0] for _, tuning in pair]
        plans = {rows: kernels.Alignment(routes, self.model.num_experts, rows, self.device) for rows in blocks}

        def gemm(layer, inputs, outputs, rows, config, top_k):
            plan = plans[rows]
            layer(
                inputs=inputs,
                outputs=outputs,
                sorted_ids=plan.sorted_ids,
                expert_ids=plan.expert_ids,
                num_tokens_padded=plan.padded,
                top_k=top_k,
                valid_shape_m=routes,
                compute_config=config[0],
                tuning_config=config[1],
            )

        def forward(copy, call, out):
            fc1, fc2 = self.weights.copies[copy][padding]
            for plan in plans.values():
                plan.run(call.routing_map)
            gemm(fc1, call.hidden_states, self.h, blocks[0], pair[0], self.model.top_k)
            kernels.activate(self.h, self.a, self.model.gated)
            gemm(fc2, self.a, self.y, blocks[1], pair[1], 1)
            kernels.combine(self.y, call.probabilities, None, out)

        return forward

    def _grouped(self, padding, pair, routes):
        plan = kernels.Alignment(routes, self.model.num_experts, 1, self.device)

        def gemm(layer, inputs, outputs, config):
            layer(
                inputs=inputs,
                outputs=outputs,
                expert_layout=plan.offsets[: self.model.num_experts + 1],
                valid_shape_m=routes,
                compute_config=config[0],
                tuning_config=config[1],
            )

        def forward(copy, call, out):
            fc1, fc2 = self.weights.copies[copy][padding]
            plan.run(call.routing_map)
            kernels.gather(call.hidden_states, plan.sorted_ids, self.model.top_k, self.x)
            gemm(fc1, self.x, self.h, pair[0])
            kernels.activate(self.h, self.a, self.model.gated)
            gemm(fc2, self.a, self.y, pair[1])
            kernels.combine(self.y, call.probabilities, plan.positions, out)

        return forward


PEERS = {
    "humming": (HummingWeights, HummingLayers),
    "triton": (Bf16Weights, TritonLayer),
    "torch": (Bf16Weights, TorchLayer),
}
