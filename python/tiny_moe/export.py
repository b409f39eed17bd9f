"""Writes a trained variant as BF16 safetensors, records its MoE layers on held-out text, and prints
what BF16 and NVFP4 cost.

    python export.py swiglu --weights swiglu.pt --out ../../data

makes data/tiny-swiglu/{config.json,model.safetensors,tokens.safetensors} and data/held_out.txt.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

import nvfp4
import text
from model import CONFIGS, NORM_EPS, ROPE_THETA, Config, Moe, TinyMoe
from train import bits_per_byte

WINDOWS = 128  # of held-out text, context + 1 bytes each: shipped, and what all figures are on
RECORDED_WINDOWS = 2


def checkpoint_names(config: Config, model: TinyMoe) -> dict[str, Tensor]:
    """Tensors under the names of the variant's family, BF16."""
    qwen = config.gated
    root = "model" if qwen else "backbone"
    tensors = {
        f"{root}.embed_tokens.weight" if qwen else f"{root}.embeddings.weight": model.embeddings.weight,
        f"{root}.norm.weight" if qwen else f"{root}.norm_f.weight": model.norm.weight,
        "lm_head.weight": model.head.weight,
    }
    for n, block in enumerate(model.blocks):
        attention, moe = config.attention_prefix(n), config.moe_prefix(n)
        moe_block = attention if qwen else moe.removesuffix(".mixer")
        mixer = f"{attention}.self_attn" if qwen else f"{attention}.mixer"
        tensors[f"{attention}.{'input_layernorm' if qwen else 'norm'}.weight"] = block.attention_norm.weight
        for name, parameter in block.attention.named_parameters():
            tensors[f"{mixer}.{name}"] = parameter
        norm = "post_attention_layernorm" if qwen else "norm"
        tensors[f"{moe_block}.{norm}.weight"] = block.moe_norm.weight
        tensors[f"{moe}.gate.weight"] = block.moe.router
        for e, (fc1, fc2) in enumerate(zip(block.moe.fc1, block.moe.fc2)):
            expert = f"{moe}.experts.{e}"
            if qwen:
                tensors[f"{expert}.gate_proj.weight"], tensors[f"{expert}.up_proj.weight"] = fc1.chunk(2)
            else:
                tensors[f"{expert}.up_proj.weight"] = fc1
            tensors[f"{expert}.down_proj.weight"] = fc2
    return {name: t.detach().bfloat16().contiguous() for name, t in tensors.items()}


def hugging_face_config(config: Config) -> dict:
    common = {
        "model_type": f"tiny_moe_{config.variant}",
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "moe_intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_experts_per_tok": config.top_k,
        "norm_topk_prob": True,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": False,
    }
    if config.gated:
        layers = {"num_hidden_layers": config.num_blocks, "num_experts": config.num_experts}
        return common | layers | {"hidden_act": "silu"}
    layers = {"num_hidden_layers": 2 * config.num_blocks, "n_routed_experts": config.num_experts}
    pattern = {"hybrid_override_pattern": "*E" * config.num_blocks, "mlp_hidden_act": "relu2"}
    return common | layers | pattern


def expert_layer(moe: Moe, x: Tensor, ids: Tensor, probabilities: Tensor) -> Tensor:
    """The layer in FP64 on the given values, nothing rounded between."""
    double = Moe.__new__(Moe)
    torch.nn.Module.__init__(double)
    double.gated, double.top_k = moe.gated, moe.top_k
    double.fc1, double.fc2 = moe.fc1.double(), moe.fc2.double()
    return double.experts(x.double(), ids, probabilities.double())


class Nvfp4Experts:
    """NVFP4 weights times NVFP4 activations, for the experts of one layer: docs/format.md section 6,
    with sums in FP64."""

    def __init__(self, moe: Moe):
        self.moe = moe
        self.fc1 = [nvfp4.round_trip(w, per_row=False) for w in moe.fc1]
        self.fc2 = [nvfp4.round_trip(w, per_row=False) for w in moe.fc2]

    def __call__(self, x: Tensor, ids: Tensor, probabilities: Tensor) -> Tensor:
        x = nvfp4.round_trip(x.bfloat16(), per_row=True)
        out = torch.zeros(x.shape, dtype=torch.float64)
        for e, (fc1, fc2) in enumerate(zip(self.fc1, self.fc2)):
            tokens, slots = (ids == e).nonzero(as_tuple=True)
            if tokens.numel() == 0:
                continue
            inner = self.moe.activate(x[tokens] @ fc1.T).bfloat16()
            routes = (nvfp4.round_trip(inner, per_row=True) @ fc2.T).bfloat16()
            out.index_add_(0, tokens, routes.double() * probabilities[tokens, slots].double()[:, None])
        return out.float()


@torch.no_grad()
def record(model: TinyMoe, ids: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What goes into and should come out of each MoE layer, and how far NVFP4 is from that."""
    tensors, figures = {"input_ids": ids.int()}, {}
    x = model.embeddings(ids)
    for n, block in enumerate(model.blocks):
        prefix = model.config.moe_prefix(n)
        x = x + block.attention(block.attention_norm(x))
        hidden = block.moe_norm(x).flatten(0, 1).bfloat16()
        experts, probabilities = block.moe.route(hidden.float())
        expected = expert_layer(block.moe, hidden, experts, probabilities)
        tensors[f"{prefix}.hidden_states"] = hidden
        tensors[f"{prefix}.routing_map"] = experts.int()
        tensors[f"{prefix}.probabilities"] = probabilities
        tensors[f"{prefix}.expected"] = expected.float()
        got = Nvfp4Experts(block.moe)(hidden.float(), experts, probabilities).double()
        figures[prefix] = {
            "relative_l2": round(((got - expected).norm() / expected.norm()).item(), 4),
            "cosine": round((got * expected).sum().div(got.norm() * expected.norm()).item(), 5),
            "tokens_per_expert": torch.bincount(experts.flatten(), minlength=16).tolist(),
        }
        x = x + expected.float().view_as(x)
    return tensors, figures


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("variant", choices=CONFIGS)
    parser.add_argument("--weights", required=True, help="state dict that train.py wrote")
    parser.add_argument("--out", required=True, type=Path, help="data folder")
    parser.add_argument("--text", help="jargon.dict.dz, if not installed and not to be downloaded")
    args = parser.parse_args()

    torch.set_num_threads(1)
    config = CONFIGS[args.variant]
    held_out = text.load(args.text)[1][: WINDOWS * (config.context + 1)]
    model = TinyMoe(config)
    model.load_state_dict(torch.load(args.weights, weights_only=True))
    costs = {"fp32": bits_per_byte(model, held_out)}
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    costs["bf16"] = bits_per_byte(model, held_out)
    model.eval()

    folder = args.out / f"tiny-{args.variant}"
    folder.mkdir(parents=True, exist_ok=True)
    (args.out / "held_out.txt").write_bytes(held_out)
    (folder / "config.json").write_text(json.dumps(hugging_face_config(config), indent=2) + "\n")
    save_file(checkpoint_names(config, model), folder / "model.safetensors", {"format": "pt"})
    windows = torch.from_numpy(np.frombuffer(held_out, np.uint8).astype(np.int64))
    windows = windows.view(-1, config.context + 1)[:RECORDED_WINDOWS, :-1]
    tensors, layers = record(model, windows)
    save_file(tensors, folder / "tokens.safetensors", {"format": "pt"})

    for block in model.blocks:
        block.moe.experts = Nvfp4Experts(block.moe)
    costs["nvfp4_experts"] = bits_per_byte(model, held_out)
    print(json.dumps({"bits_per_byte": {k: round(v, 4) for k, v in costs.items()}}))
    for prefix, figures in layers.items():
        print(json.dumps({prefix: figures}))


if __name__ == "__main__":
    main()
