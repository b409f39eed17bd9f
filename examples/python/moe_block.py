"""A mixture-of-experts block in torch: a router, and routed experts in NVFP4 behind it.

    python moe_block.py
"""

import torch
from torch import nn

from hexpert.torch import RoutedExperts


class MoeBlock(nn.Module):
    """[..., hidden_size] bf16 -> the same: top-k softmax routing over NVFP4 experts."""

    def __init__(self, router, fc1_weight, fc2_weight, *, top_k, max_tokens):
        super().__init__()
        self.router = nn.Parameter(router)  # [num_experts, hidden_size]
        self.top_k = top_k
        self.experts = RoutedExperts(fc1_weight, fc2_weight, top_k=top_k, max_tokens=max_tokens)

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        logits = (tokens @ self.router.T).float()
        top, ids = logits.topk(self.top_k, dim=-1)
        return self.experts(tokens, ids, top.softmax(-1)).view_as(x)


def exact(block, fc1_weight, fc2_weight, x):
    """The same block with BF16 experts and FP32 arithmetic."""
    tokens = x.reshape(-1, x.shape[-1])
    top, ids = (tokens @ block.router.T).float().topk(block.top_k, dim=-1)
    out = torch.zeros(tokens.shape)
    for expert, (fc1, fc2) in enumerate(zip(fc1_weight.float(), fc2_weight.float())):
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        gate, up = (tokens[rows].float() @ fc1.T).chunk(2, dim=-1)
        routed = (nn.functional.silu(gate) * up) @ fc2.T
        out.index_add_(0, rows, routed * top.softmax(-1)[rows, slots, None])
    return out.view_as(x)


@torch.no_grad()
def main():
    torch.manual_seed(0)
    experts, hidden, inter = 8, 256, 192
    fc1 = (torch.randn(experts, 2 * inter, hidden) / 16).bfloat16()  # gate rows first, then up rows
    fc2 = (torch.randn(experts, hidden, inter) / 14).bfloat16()
    block = MoeBlock(torch.randn(experts, hidden).bfloat16(), fc1, fc2, top_k=2, max_tokens=64)
    x = torch.randn(4, 16, hidden).bfloat16()
    y = block(x)
    want = exact(block, fc1, fc2, x)
    error = ((y.float() - want).norm() / want.norm()).item()
    print(block)
    print(f"relative L2 against BF16 experts: {error:.3f}")
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")  # no graph breaks
    same = torch.equal(compiled(x), y)
    print(f"compiled: {'the same bits' if same else 'other bits'}")
    return 0 if same and error < 0.3 else 1


if __name__ == "__main__":
    raise SystemExit(main())
