"""hexpert in torch: a module of routed experts, and the custom op behind it for torch.compile."""

import itertools
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ._core import ActivationType, ExpertWeights, RoutedMoe

__all__ = ["RoutedExperts"]

# Custom ops take tensors and numbers only, so a layer travels as its number.
_layers: dict[int, RoutedMoe] = {}
_numbers = itertools.count()
_lock = threading.Lock()


def _register(owner: nn.Module, layer: RoutedMoe) -> int:
    with _lock:
        number = next(_numbers)
        _layers[number] = layer
    weakref.finalize(owner, _layers.pop, number, None)
    return number


@torch.library.custom_op("hexpert::routed_moe", mutates_args=())
def _routed_moe(
    hidden_states: Tensor,
    routing_map: Tensor,
    probabilities: Tensor,
    layer: int,
    token_capacity: int | None = None,
    use_bounded_rows: bool = False,
) -> Tensor:
    return _layers[layer].forward(
        hidden_states,
        routing_map,
        probabilities,
        token_capacity=token_capacity,
        use_bounded_rows=use_bounded_rows,
    )


@_routed_moe.register_fake
def _(hidden_states: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(hidden_states)


@torch.library.custom_op("hexpert::routed_moe_out", mutates_args=("out",))
def _routed_moe_out(
    hidden_states: Tensor,
    routing_map: Tensor,
    probabilities: Tensor,
    out: Tensor,
    layer: int,
    token_capacity: int | None = None,
    use_bounded_rows: bool = False,
) -> None:
    _layers[layer].forward(
        hidden_states,
        routing_map,
        probabilities,
        out,
        token_capacity=token_capacity,
        use_bounded_rows=use_bounded_rows,
    )


@_routed_moe_out.register_fake
def _(*_: Any) -> None:
    return None


class RoutedExperts(nn.Module):
    """The routed experts of one layer in NVFP4: what stands behind a router.

    Holds no parameters: the BF16 stacks are quantized and not kept. Not differentiable. Works under
    torch.compile without graph breaks and, on a GPU, under torch.cuda.graph. Copies and pickles hold the NVFP4
    weights; each copy plans a layer with a workspace of its own.

    fc1_weight  [L, I, H] bf16 (squared ReLU), or [L, 2 I, H] (gated): gate rows first, then up rows
    fc2_weight  [L, H, I] bf16
    top_k       experts per token
    max_tokens  largest number of tokens of one call
    num_experts, local_expert_offset
                experts of the whole layer, and the first one of these stacks. Default: these are all.
    activation  default: SWIGLU for gated stacks, SQUARED_RELU otherwise

    Other keywords are those of RoutedMoe.create. Raises as ExpertWeights.prepare and RoutedMoe.create do.
    """

    def __init__(
        self,
        fc1_weight: Tensor,
        fc2_weight: Tensor,
        *,
        top_k: int,
        max_tokens: int,
        num_experts: int | None = None,
        local_expert_offset: int = 0,
        activation: ActivationType | None = None,
        **options: Any,
    ):
        super().__init__()
        self.weights = ExpertWeights.prepare(fc1_weight, fc2_weight)
        if activation is None:
            activation = ActivationType.SWIGLU if self.weights.gated else ActivationType.SQUARED_RELU
        self._problem = dict(
            max_tokens=max_tokens,
            top_k=top_k,
            num_experts=self.weights.num_local_experts if num_experts is None else num_experts,
            local_expert_offset=local_expert_offset,
            activation=activation,
            **options,
        )
        self._plan(self._problem.pop("workspace", None))

    def _plan(self, workspace: Any) -> None:
        self.layer = RoutedMoe.create(self.weights, **self._problem, workspace=workspace)
        self._number = _register(self, self.layer)

    def __getstate__(self) -> dict[str, Any]:
        # What compile() made calls this module, not a copy; nn.Module leaves it out as well.
        own = ("layer", "_number", "_compiled_call_impl")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan(None)

    def forward(
        self,
        hidden_states: Tensor,
        routing_map: Tensor,
        probabilities: Tensor,
        out: Tensor | None = None,
        *,
        token_capacity: int | None = None,
        use_bounded_rows: bool = False,
    ) -> Tensor:
        """hidden_states [tokens, H] bf16, routing_map [tokens, top_k] int32 or int64, probabilities
        [tokens, top_k] float32 -> [tokens, H] bf16, or `out`, bf16 or float32. The rest, and what is raised, as for
        RoutedMoe.forward."""
        inputs = hidden_states, routing_map, probabilities
        if not torch.compiler.is_compiling():
            return self.layer.forward(
                *inputs, out, token_capacity=token_capacity, use_bounded_rows=use_bounded_rows
            )
        if out is None:
            return _routed_moe(*inputs, self._number, token_capacity, use_bounded_rows)
        _routed_moe_out(*inputs, out, self._number, token_capacity, use_bounded_rows)
        return out

    def refresh(self, fc1_weight: Tensor, fc2_weight: Tensor) -> None:
        """Quantizes new stacks into the same memory: captured graphs then compute with them. Raises as
        ExpertWeights.refresh does."""
        self.weights.refresh(fc1_weight, fc2_weight)

    def extra_repr(self) -> str:
        return self.layer.plan
