"""A byte-level mixture-of-experts language model small enough to train on a laptop.

Pre-norm transformer: causal attention with rotary positions, then a routed MoE layer, in every
block. Two variants differ in their experts and in the names their tensors are exported under:

    swiglu  down(silu(gate(x)) * up(x))   Qwen-MoE names:   model.layers.N.mlp.experts.E.*
    relu2   down(relu(up(x)) ** 2)        Nemotron-H names: backbone.layers.N.mixer.experts.E.*
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPS = 1e-5
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class Config:
    variant: str
    hidden_size: int
    intermediate_size: int
    num_blocks: int = 2
    num_heads: int = 4
    num_experts: int = 16
    top_k: int = 4
    vocab_size: int = 256
    context: int = 256

    @property
    def gated(self) -> bool:
        return self.variant == "swiglu"

    def attention_prefix(self, block: int) -> str:
        return f"model.layers.{block}" if self.gated else f"backbone.layers.{2 * block}"

    def moe_prefix(self, block: int) -> str:
        """Prefix of the router, the experts and the recorded tensors of a block."""
        return f"model.layers.{block}.mlp" if self.gated else f"backbone.layers.{2 * block + 1}.mixer"


# Sizes are deliberately awkward: no multiple of 64, and intermediate_size 104 is no multiple of 16.
CONFIGS = {
    "swiglu": Config("swiglu", hidden_size=144, intermediate_size=104),
    "relu2": Config("relu2", hidden_size=160, intermediate_size=112),
}


def rotate(x: Tensor) -> Tensor:
    """Rotary positions on [..., length, head_size]."""
    length, size = x.shape[-2:]
    inverse = ROPE_THETA ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * inverse
    cos, sin = angle.cos(), angle.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.num_heads = config.num_heads
        size = config.hidden_size
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        q, k, v = (
            p(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, size))


class Moe(nn.Module):
    """Top-k softmax routing over experts held as stacks.

    fc1 is [num_experts, I, H], or [num_experts, 2 I, H] with the gate rows first; fc2 is
    [num_experts, H, I].
    """

    def __init__(self, config: Config):
        super().__init__()
        self.gated, self.top_k = config.gated, config.top_k
        experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        self.router = nn.Parameter(torch.randn(experts, hidden) * hidden**-0.5)
        fc1_rows = 2 * inner if self.gated else inner
        self.fc1 = nn.Parameter(torch.randn(experts, fc1_rows, hidden) * hidden**-0.5)
        self.fc2 = nn.Parameter(torch.randn(experts, hidden, inner) * inner**-0.5 * 0.5)
        self.balance_loss = torch.zeros(())

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [T, k] and their probabilities, which add up to 1 per token."""
        logits = x @ self.router.T
        top, ids = logits.topk(self.top_k, dim=-1)
        if self.training:
            num_experts = logits.shape[-1]
            load = torch.bincount(ids.flatten(), minlength=num_experts) / ids.numel()
            self.balance_loss = num_experts * (load * logits.softmax(-1).mean(0)).sum()
        return ids, top.softmax(-1)

    def activate(self, z: Tensor) -> Tensor:
        if self.gated:
            gate, up = z.chunk(2, dim=-1)
            return F.silu(gate) * up
        return F.relu(z).square()

    def experts(self, x: Tensor, ids: Tensor, probabilities: Tensor) -> Tensor:
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        tokens = order // self.top_k
        counts = torch.bincount(flat, minlength=self.fc1.shape[0]).tolist()
        routes = [
            self.activate(rows @ fc1.T) @ fc2.T
            for rows, fc1, fc2 in zip(x[tokens].split(counts), self.fc1, self.fc2)
        ]
        weighted = torch.cat(routes) * probabilities.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, tokens, weighted)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return self.experts(flat, *self.route(flat)).view_as(x)


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=NORM_EPS)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.hidden_size, eps=NORM_EPS)
        self.moe = Moe(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x))


class TinyMoe(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embeddings.weight, std=0.5)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_blocks))
        self.norm = nn.RMSNorm(config.hidden_size, eps=NORM_EPS)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Byte ids [batch, length] -> logits [batch, length, vocab_size]."""
        x = self.embeddings(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
