"""NVFP4 experts in a Hugging Face style model: every sparse block that holds a router `gate` and a list
`experts` of modules with gate_proj, up_proj, down_proj (Qwen-MoE, DeepSeek, OLMoE ...) gets its experts
replaced, in place. The router stays as it is.

    python hugging_face.py
"""

import torch
from torch import nn

from hexpert.torch import RoutedExperts


class Nvfp4SparseMoeBlock(nn.Module):
    """Drop-in for a block with attributes gate, experts, top_k and norm_topk_prob."""

    def __init__(self, block, max_tokens):
        super().__init__()
        self.gate = block.gate
        self.top_k = block.top_k
        self.norm_topk_prob = block.norm_topk_prob
        weights = [expert.gate_proj.weight for expert in block.experts], [e.up_proj.weight for e in block.experts]
        fc1 = torch.cat([torch.stack(part).bfloat16() for part in weights], dim=1)
        fc2 = torch.stack([expert.down_proj.weight for expert in block.experts]).bfloat16()
        self.experts = RoutedExperts(fc1, fc2, top_k=block.top_k, max_tokens=max_tokens)

    def forward(self, hidden_states):
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        probabilities = self.gate(tokens).float().softmax(-1)
        top, ids = probabilities.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            top = top / top.sum(-1, keepdim=True)
        out = self.experts(tokens.bfloat16(), ids, top)
        return out.view_as(hidden_states).to(hidden_states.dtype)


def quantize_experts(model, max_tokens):
    """Replaces every sparse block of `model`. Returns how many there were."""
    replaced = 0
    for module in list(model.modules()):
        for name, child in module.named_children():
            experts = getattr(child, "experts", None)
            if isinstance(experts, nn.ModuleList) and all(hasattr(e, "down_proj") for e in experts):
                setattr(module, name, Nvfp4SparseMoeBlock(child, max_tokens))
                replaced += 1
    return replaced


# ---- A model of that shape, to try it on ----


class Expert(nn.Module):
    def __init__(self, hidden, inter):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inter, bias=False)
        self.up_proj = nn.Linear(hidden, inter, bias=False)
        self.down_proj = nn.Linear(inter, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseMoeBlock(nn.Module):
    def __init__(self, hidden, inter, num_experts, top_k):
        super().__init__()
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(hidden, inter) for _ in range(num_experts))
        self.top_k, self.norm_topk_prob = top_k, True

    def forward(self, hidden_states):
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        top, ids = self.gate(tokens).float().softmax(-1).topk(self.top_k, dim=-1)
        top = (top / top.sum(-1, keepdim=True)).to(tokens.dtype)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            rows, slots = (ids == e).nonzero(as_tuple=True)
            out.index_add_(0, rows, expert(tokens[rows]) * top[rows, slots, None])
        return out.view_as(hidden_states)


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.mlp = SparseMoeBlock(hidden, 96, 8, 2)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


@torch.no_grad()
def main():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(128) for _ in range(3))).bfloat16()
    x = torch.randn(2, 24, 128).bfloat16()
    before = model(x).float()
    count = quantize_experts(model, max_tokens=x.shape[0] * x.shape[1])
    after = model(x).float()
    error = ((after - before).norm() / (before - x.float()).norm()).item()
    print(f"{count} blocks replaced, relative L2 of what they add: {error:.3f}")
    return 0 if count == 3 and error < 0.3 else 1


if __name__ == "__main__":
    raise SystemExit(main())
