"""NVFP4 experts in a Hugging Face model (transformers 5): every module that holds stacked SwiGLU experts, `gate_up_proj`
and `down_proj` (Mixtral, Qwen-MoE, DeepSeek, OLMoE ...), is replaced in place. Routers and shared experts stay.

    model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16")
    quantize_experts(model, top_k=model.config.num_experts_per_tok, max_tokens=4096)

    python hugging_face.py
"""

import torch
from torch import nn

from hexpert.torch import RoutedExperts


class Nvfp4Experts(nn.Module):
    """Drop-in for experts [num_experts, 2 * inter, hidden] (gate first) and [num_experts, hidden, inter]."""

    def __init__(self, experts, top_k, max_tokens):
        super().__init__()
        stacks = (w.detach().bfloat16().contiguous() for w in (experts.gate_up_proj, experts.down_proj))
        self.experts = RoutedExperts(*stacks, top_k=top_k, max_tokens=max_tokens)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = self.experts(hidden_states.bfloat16().contiguous(), top_k_index, top_k_weights.float())
        return out.to(hidden_states.dtype)


def has_swiglu_experts(module):
    """Neither transposed, nor with biases, nor with another activation."""
    fc1, fc2 = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not isinstance(fc1, nn.Parameter) or not isinstance(fc2, nn.Parameter) or fc1.dim() != 3:
        return False
    probe = torch.linspace(-4, 4, 9)
    return (
        fc1.shape == (fc2.shape[0], 2 * fc2.shape[2], fc2.shape[1])
        and not any(name.endswith("bias") for name, _ in module.named_parameters())
        and torch.allclose(module.act_fn(probe), nn.functional.silu(probe))
    )


def quantize_experts(model, top_k, max_tokens):
    """Replaces all experts of `model`. Returns of how many layers."""
    replaced = 0
    for module in list(model.modules()):
        for name, child in module.named_children():
            if has_swiglu_experts(child):
                setattr(module, name, Nvfp4Experts(child, top_k, max_tokens))
                replaced += 1
    return replaced


# ---- A model of that shape, to try it on ----


class Experts(nn.Module):
    def __init__(self, num_experts, hidden, inter):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * inter, hidden) / (5 * hidden) ** 0.5)
        self.down_proj = nn.Parameter(torch.randn(num_experts, hidden, inter) / (5 * inter) ** 0.5)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for e in range(len(self.down_proj)):
            rows, slots = (top_k_index == e).nonzero(as_tuple=True)
            gate, up = (hidden_states[rows] @ self.gate_up_proj[e].T).chunk(2, dim=-1)
            routed = (self.act_fn(gate) * up) @ self.down_proj[e].T
            out.index_add_(0, rows, routed * top_k_weights[rows, slots, None])
        return out


class SparseMoeBlock(nn.Module):
    def __init__(self, hidden, inter, num_experts, top_k):
        super().__init__()
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.experts = Experts(num_experts, hidden, inter)
        self.top_k = top_k

    def forward(self, hidden_states):
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        top, ids = self.gate(tokens).float().softmax(-1).topk(self.top_k, dim=-1)
        top = (top / top.sum(-1, keepdim=True)).to(tokens.dtype)
        return self.experts(tokens, ids, top).view_as(hidden_states)


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
    count = quantize_experts(model, top_k=2, max_tokens=x.shape[0] * x.shape[1])
    after = model(x).float()
    error = ((after - before).norm() / (before - x.float()).norm()).item()
    print(f"experts of {count} layers replaced, relative L2 of what they add: {error:.3f}")
    return 0 if count == 3 and error < 0.3 else 1


if __name__ == "__main__":
    raise SystemExit(main())
