"""What NVFP4 experts do to the shipped language models: bits per byte, agreement on the next byte, and the error
of each layer, for three kinds of experts:

    bf16          BF16 weights, FP32 arithmetic: the yardstick
    nvfp4         NVFP4 weights and activations, through hexpert
    nvfp4-weights NVFP4 weights and BF16 activations

    python evaluate.py --plot nvfp4.svg

Needs torch, safetensors and hexpert; matplotlib for the plot.
"""

import argparse
import json
import math
from pathlib import Path

import hexpert
import numpy as np
import torch
import torch.nn.functional as F
from hexpert.torch import RoutedExperts
from model import CONFIGS, Config, TinyMoe
from safetensors.torch import load_file
from torch import Tensor

DATA = Path(__file__).parents[2] / "data"
KINDS = ("bf16", "nvfp4", "nvfp4-weights")
BATCH = 16  # windows at a time


def load_model(config: Config, folder: Path) -> TinyMoe:
    """The shipped checkpoint as a model: export.py's names, read back."""
    tensors = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
    qwen = config.gated
    root = "model" if qwen else "backbone"
    model = TinyMoe(config)
    state = {
        "embeddings.weight": tensors[f"{root}.embed_tokens.weight" if qwen else f"{root}.embeddings.weight"],
        "norm.weight": tensors[f"{root}.norm.weight" if qwen else f"{root}.norm_f.weight"],
        "head.weight": tensors["lm_head.weight"],
    }
    for n in range(config.num_blocks):
        attention, moe = config.attention_prefix(n), config.moe_prefix(n)
        block = attention if qwen else moe.removesuffix(".mixer")
        mixer = f"{attention}.self_attn" if qwen else f"{attention}.mixer"
        state[f"blocks.{n}.attention_norm.weight"] = tensors[
            f"{attention}.{'input_layernorm' if qwen else 'norm'}.weight"
        ]
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            state[f"blocks.{n}.attention.{name}.weight"] = tensors[f"{mixer}.{name}.weight"]
        state[f"blocks.{n}.moe_norm.weight"] = tensors[
            f"{block}.{'post_attention_layernorm' if qwen else 'norm'}.weight"
        ]
        state[f"blocks.{n}.moe.router"] = tensors[f"{moe}.gate.weight"]

        def stack(projection):
            return torch.stack(
                [tensors[f"{moe}.experts.{e}.{projection}.weight"] for e in range(config.num_experts)]
            )

        up = stack("up_proj")
        state[f"blocks.{n}.moe.fc1"] = torch.cat((stack("gate_proj"), up), 1) if qwen else up
        state[f"blocks.{n}.moe.fc2"] = stack("down_proj")
    model.load_state_dict(state)
    return model.eval()


def dequantized(weights: hexpert.ExpertWeights, projection: hexpert.Projection, like: Tensor) -> Tensor:
    """One projection of all experts as NVFP4 represents it: [experts, rows, cols] FP32."""
    values = []
    for expert in range(weights.num_local_experts):
        codes, scales, alpha = weights.export_projection(expert, projection, like=like)
        values.append(hexpert.dequantize(codes, scales, torch.tensor([alpha])))
    cols = weights.intermediate_size if projection is hexpert.Projection.DOWN else weights.hidden_size
    return torch.stack(values)[:, :, :cols]


class Experts:
    """The three kinds of experts of one layer."""

    def __init__(self, moe, max_tokens: int):
        self.moe = moe
        fc1, fc2 = moe.fc1.detach().bfloat16(), moe.fc2.detach().bfloat16()
        self.nvfp4 = RoutedExperts(fc1, fc2, top_k=moe.top_k, max_tokens=max_tokens)
        weights = self.nvfp4.weights
        first = (hexpert.Projection.GATE, hexpert.Projection.UP) if moe.gated else (hexpert.Projection.UP,)
        self.fc1 = torch.cat([dequantized(weights, projection, fc1) for projection in first], 1)
        self.fc2 = dequantized(weights, hexpert.Projection.DOWN, fc1)

    def run(self, kind: str, x: Tensor, ids: Tensor, probabilities: Tensor) -> Tensor:
        if kind == "nvfp4":
            out = torch.empty(x.shape)
            return self.nvfp4(x.bfloat16(), ids, probabilities, out)
        if kind == "bf16":
            return self.dense(x, ids, probabilities, self.moe.fc1, self.moe.fc2, lambda h: h)
        return self.dense(
            x.bfloat16().float(), ids, probabilities, self.fc1, self.fc2, lambda h: h.bfloat16().float()
        )

    def dense(self, x, ids, probabilities, fc1, fc2, rounded) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(fc1.shape[0]):
            tokens, slots = (ids == expert).nonzero(as_tuple=True)
            routes = rounded(self.moe.activate(x[tokens] @ fc1[expert].T)) @ fc2[expert].T
            out.index_add_(0, tokens, routes * probabilities[tokens, slots, None])
        return out


@torch.no_grad()
def evaluate(variant: str, windows: Tensor) -> dict:
    config = CONFIGS[variant]
    model = load_model(config, DATA / f"tiny-{variant}")
    layers = [Experts(block.moe, BATCH * config.context) for block in model.blocks]
    figures = {kind: {"nats": 0.0, "agree": 0} for kind in KINDS}
    errors = {kind: [[0.0, 0.0] for _ in layers] for kind in KINDS[1:]}

    def experts_of(layer: int, kind: str):
        def experts(x, ids, probabilities):
            out = layers[layer].run(kind, x, ids, probabilities)
            if kind == "bf16":  # every kind on the same input: the error of this layer alone
                for other, sums in errors.items():
                    got = layers[layer].run(other, x, ids, probabilities).double()
                    sums[layer][0] += (got - out).square().sum().item()
                    sums[layer][1] += out.double().square().sum().item()
            return out

        return experts

    for batch in windows.split(BATCH):
        want = None
        for kind in KINDS:
            for layer, block in enumerate(model.blocks):
                block.moe.experts = experts_of(layer, kind)
            logits = model(batch[:, :-1]).flatten(0, 1)
            figures[kind]["nats"] += F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum").item()
            guess = logits.argmax(-1)
            want = guess if want is None else want
            figures[kind]["agree"] += (guess == want).sum().item()
    count = windows[:, 1:].numel()
    return {
        "bits_per_byte": {k: f["nats"] / count / math.log(2) for k, f in figures.items()},
        "agreement": {k: f["agree"] / count for k, f in figures.items()},
        "relative_l2": {
            config.moe_prefix(n): {k: math.sqrt(sums[n][0] / sums[n][1]) for k, sums in errors.items()}
            for n in range(config.num_blocks)
        },
    }


def print_tables(results: dict) -> None:
    print("| bits per byte (next byte as with BF16) | " + " | ".join(KINDS) + " |")
    print("|---" * (len(KINDS) + 1) + "|")
    for variant, r in results.items():
        cells = [f"{r['bits_per_byte'][k]:.4f} ({100 * r['agreement'][k]:.1f} %)" for k in KINDS]
        print(f"| `tiny-{variant}` | " + " | ".join(cells) + " |")
    print("\n| relative L2 of the layer's output | " + " | ".join(KINDS[1:]) + " |")
    print("|---" * len(KINDS) + "|")
    for r in results.values():
        for prefix, errors in r["relative_l2"].items():
            print(f"| `{prefix}` | " + " | ".join(f"{errors[k]:.4f}" for k in KINDS[1:]) + " |")


def plot(results: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "hexpert"  # the same file for the same numbers
    from matplotlib import pyplot

    colors = dict(zip(KINDS, ("#8a8a8a", "#1f6fb4", "#7fb6e0")))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")

    def bars(axes, rows, kinds, form):
        for i, kind in enumerate(kinds):
            at = [n + (i - (len(kinds) - 1) / 2) * 0.8 / len(kinds) for n in range(len(rows))]
            drawn = axes.bar(at, [row[kind] for row in rows], 0.8 / len(kinds), color=colors[kind], label=kind)
            axes.bar_label(drawn, fmt=form, fontsize=7)

    rows = [r["bits_per_byte"] for r in results.values()]
    bars(left, rows, KINDS, "%.3f")
    left.set_xticks(range(len(rows)), [f"tiny-{variant}" for variant in results])
    low = min(min(row.values()) for row in rows)
    high = max(max(row.values()) for row in rows)
    left.set_ylim(low - 0.5 * (high - low), high + 0.35 * (high - low))
    left.set_title("bits per held-out byte (axis does not start at 0)", fontsize=9)
    left.legend(fontsize=8, loc="upper left")
    layers = {p: e for r in results.values() for p, e in r["relative_l2"].items()}
    bars(right, list(layers.values()), KINDS[1:], "%.3f")
    names = [p.replace("model.layers.", "swiglu ").replace("backbone.layers.", "relu2 ") for p in layers]
    right.set_xticks(range(len(names)), [n.split(".")[0] for n in names], fontsize=8)
    right.set_title("relative L2 of each layer's output against BF16 experts", fontsize=9)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--windows", type=int, default=128, help="of 257 bytes each of data/held_out.txt")
    parser.add_argument("--plot", type=Path, help="SVG to write")
    parser.add_argument("--json", type=Path, help="figures to write")
    args = parser.parse_args()

    text = np.frombuffer((DATA / "held_out.txt").read_bytes(), np.uint8).astype(np.int64)
    length = CONFIGS["swiglu"].context + 1
    windows = torch.from_numpy(text)[: args.windows * length].view(-1, length)
    results = {variant: evaluate(variant, windows) for variant in CONFIGS}
    print_tables(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
