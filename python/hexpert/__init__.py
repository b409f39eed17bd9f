"""Routed NVFP4 mixture-of-experts layers.

    weights = hexpert.ExpertWeights.prepare(fc1_weight, fc2_weight)      # BF16 stacks
    layer = hexpert.RoutedMoe.create(weights, max_tokens=256, top_k=8, num_experts=128)
    y = layer.forward(hidden_states, routing_map, probabilities)         # [tokens, hidden_size]

Arrays are those of numpy, torch, or any framework that speaks DLPack; none is copied, and new ones are
of the framework and device of the first argument. BF16 in numpy is ml_dtypes.bfloat16 or its bits as uint16.
`hexpert.torch` has the custom op and module for torch, `hexpert.megatron` Megatron-Core's names.
"""

from . import _arrays  # noqa: F401  here rather than in the first call that makes an array
from ._core import (
    ActivationType,
    BackendInfo,
    ExpertWeights,
    FourOverSix,
    Projection,
    RoutedMoe,
    ScaleLayout,
    UnsupportedError,
    __version__,
    dequantize,
    list_backends,
    quantize_matrix,
    quantize_tokens,
    query_backend,
)

__all__ = [
    "ActivationType",
    "BackendInfo",
    "ExpertWeights",
    "FourOverSix",
    "Projection",
    "RoutedMoe",
    "ScaleLayout",
    "UnsupportedError",
    "__version__",
    "dequantize",
    "list_backends",
    "quantize_matrix",
    "quantize_tokens",
    "query_backend",
]
