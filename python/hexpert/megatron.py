"""Megatron-Core's module `core.inference.moe.flashinfer_nvfp4`, name for name, on hexpert.

    import hexpert.megatron as flashinfer_nvfp4

serves devices that FlashInfer has no kernels for. Arguments, defaults, shapes and meaning are those of the
published page of that module; docs/megatron.md lists the few places where hexpert had to choose.
"""

import copy
import itertools
import operator
import threading
import weakref
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from . import _core
from ._core import ExpertWeights, RoutedMoe, UnsupportedError

NVFP4_BLOCK_SIZE = 16
FLOAT4_E2M1_MAX = 6.0
FLOAT8_E4M3_MAX = 448.0
# Each token's largest magnitude lands on the end of the E2M1 x E4M3 grid. As FP32: 0x39C30C31.
PER_TOKEN_ACTIVATION_GLOBAL_SCALE = 1.0 / (FLOAT8_E4M3_MAX * FLOAT4_E2M1_MAX)

_EXPORTED = ("fc1_data", "fc1_scale_swizzled", "fc1_alpha", "fc2_data", "fc2_scale_swizzled", "fc2_alpha")


class ActivationType(Enum):
    """Megatron-Core's names of the two activations. Its own enum is accepted everywhere as well."""

    SQUARED_RELU = "squared_relu"
    SWIGLU = "swiglu"


_ACTIVATIONS = {
    "squared_relu": _core.ActivationType.SQUARED_RELU,
    "swiglu": _core.ActivationType.SWIGLU,
    # FlashInfer's names, and the values that Megatron-Core passes.
    "relu2": _core.ActivationType.SQUARED_RELU,
    "6": _core.ActivationType.SQUARED_RELU,
    "3": _core.ActivationType.SWIGLU,
}


def require_flashinfer_routed_nvfp4() -> None:
    """Raises UnsupportedError, with the reason of each backend, when there is none for the device: the
    current GPU where torch has one, else the CPU."""
    _core.query_backend(_current_device())


def _current_device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    # The question initializes CUDA, which an import must not do: forked processes could not use it. Before that, the
    # current GPU is the first.
    return f"cuda:{torch.cuda.current_device() if torch.cuda.is_initialized() else 0}"


def _have_flashinfer_routed_nvfp4() -> bool:
    try:
        require_flashinfer_routed_nvfp4()
    except UnsupportedError:
        return False
    return True


HAVE_FLASHINFER_ROUTED_NVFP4 = _have_flashinfer_routed_nvfp4()


@dataclass(eq=False, repr=False)
class FlashInferRoutedNVFP4Weights:
    """FC1 and FC2 expert stacks in NVFP4. L experts, Hp / Ip the padded sizes, N1 = Ip, or 2 Ip when gated.

    hidden_size, intermediate_size, padded_hidden_size, padded_intermediate_size: int; gated: bool
    fc1_data            uint8 [L, N1, Hp / 2]; gated rows in groups of 64, up before gate
    fc1_scale_swizzled  uint8 (E4M3) [L, N1, Hp / 16], 128x4 per expert
    fc1_scale           6D strided view of fc1_scale_swizzled: [32, 4, N1 / 128, 4, Hp / 64, L]
    fc1_alpha           float32 [L]
    fc2_data            uint8 [L, Hp, Ip / 2]; fc2_scale_swizzled, fc2_scale, fc2_alpha as FC1
    fc2_input_scale     float32 [1]: PER_TOKEN_ACTIVATION_GLOBAL_SCALE

    The layer computes from the order that its backend wants, which is the only copy in memory. The fields
    from fc1_data to fc2_alpha are exact exports of it, made when the first of them is read, and from then on
    kept: a refresh writes them anew, in place. Writing into them changes nothing until `import_fields()`.
    An object made with all fields given computes with these. Raises TypeError (a field's type or dtype) and
    ValueError (sizes, shape, device, a scale that is no view, another fc2_input_scale, padding that is not zero).
    """

    hidden_size: int
    intermediate_size: int
    padded_hidden_size: int
    padded_intermediate_size: int
    gated: bool
    fc1_data: Tensor
    fc1_scale_swizzled: Tensor
    fc1_scale: Tensor
    fc1_alpha: Tensor
    fc2_data: Tensor
    fc2_scale_swizzled: Tensor
    fc2_scale: Tensor
    fc2_alpha: Tensor
    fc2_input_scale: Tensor

    def __post_init__(self) -> None:
        for field in _EXPORTED + ("fc1_scale", "fc2_scale", "fc2_input_scale"):
            _check_tensor(field, getattr(self, field))
        if self.fc1_alpha.dim() != 1:
            raise ValueError(f"fc1_alpha: expected [experts], got {list(self.fc1_alpha.shape)}")
        self._start(
            ExpertWeights.allocate(
                num_local_experts=self.fc1_alpha.shape[0],
                hidden_size=self.hidden_size,
                intermediate_size=self.intermediate_size,
                gated=self.gated,
                device=self.fc1_data.device,
            )
        )
        for field in ("padded_hidden_size", "padded_intermediate_size"):
            if _integer(field, getattr(self, field)) != getattr(self._weights, field):
                raise ValueError(
                    f"{field}: expected {getattr(self._weights, field)}, got {getattr(self, field)}"
                )
        experts, hidden, inter = self.num_local_experts, self.padded_hidden_size, self.padded_intermediate_size
        for prefix, rows, columns in (("fc1", inter * (2 if self.gated else 1), hidden), ("fc2", hidden, inter)):
            for name, dtype, shape in (
                ("data", torch.uint8, (experts, rows, columns // 2)),
                ("scale_swizzled", torch.uint8, (experts, rows, columns // 16)),
                ("scale", torch.uint8, (32, 4, rows // 128, 4, columns // 64, experts)),
                ("alpha", torch.float32, (experts,)),
            ):
                self._check_field(f"{prefix}_{name}", dtype, shape)
            view = _scale_view(getattr(self, f"{prefix}_scale_swizzled"))
            if not torch.equal(getattr(self, f"{prefix}_scale"), view):
                raise ValueError(f"{prefix}_scale: expected a view of {prefix}_scale_swizzled, got other values")
            setattr(self, f"{prefix}_scale", view)
        self._check_field("fc2_input_scale", torch.float32, (1,))
        constant = _input_scale(self.fc1_data.device)
        if not torch.equal(self.fc2_input_scale, constant):
            raise ValueError(f"fc2_input_scale: expected {constant.item()}, got {self.fc2_input_scale.item()}")
        self.import_fields()

    def _check_field(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = getattr(self, name)
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
        if tensor.shape != shape:
            raise ValueError(f"{name}: expected {list(shape)}, got {list(tensor.shape)}")
        if tensor.device != self.fc1_data.device:
            raise ValueError(f"{name}: expected memory of {self.fc1_data.device}, got {tensor.device}")
        if not name.endswith("scale") and not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a packed tensor, got strides {list(tensor.stride())}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles hold the weights that it computes with; their fields are exported anew."""
        return type(self)._of, (self._weights,)

    def __copy__(self) -> "FlashInferRoutedNVFP4Weights":
        # Of the same weights, a refresh of one object would leave the exported fields of the other behind.
        return self._of(copy.copy(self._weights))

    @classmethod
    def _of(cls, weights: ExpertWeights) -> "FlashInferRoutedNVFP4Weights":
        self = object.__new__(cls)
        self._start(weights)
        for field in (
            "hidden_size",
            "intermediate_size",
            "padded_hidden_size",
            "padded_intermediate_size",
            "gated",
        ):
            setattr(self, field, getattr(weights, field))
        self.fc2_input_scale = _input_scale(weights.device)
        return self

    def _start(self, weights: ExpertWeights) -> None:
        self._weights = weights
        self._plans: dict[tuple[Any, ...], tuple[RoutedMoe, int]] = {}  # and its most tokens
        self._outgrown: list[RoutedMoe] = []  # captured graphs may still point into their workspaces
        self._lock = threading.Lock()
        self._number = next(_numbers)
        _weights_of[self._number] = self

    def __getattr__(self, name: str) -> Any:
        if name not in _EXPORTED + ("fc1_scale", "fc2_scale") or "_weights" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        with self._lock:
            if name not in self.__dict__:
                for field, tensor in self._export().items():
                    setattr(self, field, tensor.to(self.fc2_input_scale.device))
                self.fc1_scale = _scale_view(self.fc1_scale_swizzled)
                self.fc2_scale = _scale_view(self.fc2_scale_swizzled)
        return self.__dict__[name]

    @property
    def num_local_experts(self) -> int:
        return self._weights.num_local_experts

    def import_fields(self) -> None:
        """Takes the bytes of the canonical fields over, after somebody wrote into them."""
        self._weights.import_canonical(**{field: getattr(self, field).cpu() for field in _EXPORTED})

    def _refresh(self, fc1_weight: Tensor, fc2_weight: Tensor) -> None:
        self._weights.refresh(fc1_weight, fc2_weight)
        with self._lock:
            if "fc1_data" in self.__dict__:
                for field, tensor in self._export().items():
                    self.__dict__[field].copy_(tensor)

    def _export(self) -> dict[str, Tensor]:
        """The canonical fields in host memory, which is what a backend writes to. Waits for a GPU."""
        fields = self._weights.export_canonical(like=torch.empty(0))
        return {field: fields[field] for field in _EXPORTED}

    def _layer(self, tokens: int, top_k: int, num_experts: int, offset: int, activation: Any) -> RoutedMoe:
        """The plan for a call: one for each routing, grown by doubling."""
        key = (top_k, num_experts, offset, activation)
        planned = self._plans.get(key)
        if planned is not None and tokens <= planned[1]:
            return planned[0]
        with self._lock:
            planned = self._plans.get(key)  # another thread may have been here
            if planned is not None and tokens <= planned[1]:
                return planned[0]
            capacity = 1 << max(tokens - 1, 15).bit_length()
            grown = RoutedMoe.create(
                self._weights,
                max_tokens=capacity,
                top_k=top_k,
                num_experts=num_experts,
                local_expert_offset=offset,
                activation=activation,
            )
            if planned is not None:
                self._outgrown.append(planned[0])
            self._plans[key] = (grown, capacity)
            return grown

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._weights!r})"


def _input_scale(device: Any) -> Tensor:
    return torch.tensor([PER_TOKEN_ACTIVATION_GLOBAL_SCALE], dtype=torch.float32, device=device)


def _scale_view(swizzled: Tensor) -> Tensor:
    """[L, N, K / 16] bytes in 128x4 order as [32, 4, N / 128, 4, K / 64, L]: same memory."""
    experts, rows, columns = swizzled.shape
    row_tiles, column_tiles = rows // 128, columns // 4
    tile = 512
    return swizzled.as_strided(
        (32, 4, row_tiles, 4, column_tiles, experts),
        (16, 4, column_tiles * tile, 1, tile, row_tiles * column_tiles * tile),
    )


def prepare_routed_nvfp4_weights(
    fc1_weight: Tensor, fc2_weight: Tensor, out: FlashInferRoutedNVFP4Weights | None = None
) -> FlashInferRoutedNVFP4Weights:
    """Quantizes BF16 squared-ReLU or SwiGLU expert stacks.

    fc1_weight  [L, I, H] bf16, or [L, 2 I, H] for SwiGLU: gate rows first, then up rows
    fc2_weight  [L, H, I] bf16
    out         weights prepared for the same sizes, which are quantized again in place: no address changes.
                The caller orders that against forwards and graph launches.

    Returns new weights, or `out`. Raises TypeError (element type, `out`), ValueError (shape, layout, device,
    sizes of `out`; nothing is written then), UnsupportedError, MemoryError.
    """
    if out is None:
        return FlashInferRoutedNVFP4Weights._of(ExpertWeights.prepare(fc1_weight, fc2_weight))
    if not isinstance(out, FlashInferRoutedNVFP4Weights):
        raise TypeError(f"out: expected FlashInferRoutedNVFP4Weights, got {type(out).__name__}")
    out._refresh(fc1_weight, fc2_weight)
    return out


def quantize_routed_nvfp4_input(
    hidden_states: Tensor, padded_hidden_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Pads and quantizes the input with one FP32 scale per token.

    hidden_states       [T, H] bf16
    padded_hidden_size  >= H, a multiple of 16

    Returns (data uint8 [T, padded / 2], block scales uint8 (E4M3) [T, padded / 16] in linear order, token
    scales float32 [T]). Raises TypeError (element type), ValueError (shape, layout, size, device), MemoryError.
    """
    return _core.quantize_tokens(hidden_states, padded_hidden_size)


def flashinfer_routed_nvfp4_moe(
    hidden_states: Tensor,
    routing_map: Tensor,
    probabilities: Tensor,
    weights: FlashInferRoutedNVFP4Weights,
    *,
    num_experts: int,
    local_expert_offset: int,
    activation_type: Any,
    out: Tensor | None = None,
    token_capacity: int | None = None,
    use_bounded_rows: bool = False,
) -> Tensor:
    """Runs the routed experts.

    hidden_states    [T, H] bf16
    routing_map      [T, k] int32 or int64 global expert ids; -1 and ids of other ranks are skipped
    probabilities    [T, k] float32, applied as given
    activation_type  squared ReLU or SwiGLU: of Megatron-Core's, FlashInfer's or hexpert's enum, or the value
                     that FlashInfer's has, 6 or 3
    out              [T, H] bf16, or float32 for the unrounded sum. Default: new, bf16.
    token_capacity   with use_bounded_rows: only rows [0, token_capacity) are read and written. Later rows of
                     `out` keep their content; in a new tensor they are zero.

    The first call for a routing width, and for more tokens than before, plans and allocates. Before a graph
    is captured, run once with the largest T. Raises as hexpert.RoutedMoe.create and forward do.
    """
    if not isinstance(weights, FlashInferRoutedNVFP4Weights):
        raise TypeError(f"weights: expected FlashInferRoutedNVFP4Weights, got {type(weights).__name__}")
    for name, tensor in (("hidden_states", hidden_states), ("routing_map", routing_map)):
        _check_tensor(name, tensor)
        if tensor.dim() != 2:
            raise ValueError(f"{name}: expected rank 2, got {list(tensor.shape)}")
    inputs = hidden_states, routing_map, probabilities
    routing = num_experts, local_expert_offset, _activation(activation_type).name
    bounds = token_capacity, use_bounded_rows
    if not torch.compiler.is_compiling():
        return _run(*inputs, out, weights, *routing, *bounds)
    if out is None:
        return _moe(*inputs, weights._number, *routing, *bounds)
    _moe_out(*inputs, out, weights._number, *routing, *bounds)
    return out


def _run(
    hidden_states: Tensor,
    routing_map: Tensor,
    probabilities: Tensor,
    out: Tensor | None,
    weights: FlashInferRoutedNVFP4Weights,
    num_experts: int,
    local_expert_offset: int,
    activation: str,
    token_capacity: int | None,
    use_bounded_rows: bool,
) -> Tensor:
    layer = weights._layer(
        hidden_states.shape[0],
        routing_map.shape[1],
        _integer("num_experts", num_experts),
        _integer("local_expert_offset", local_expert_offset),
        _core.ActivationType[activation],
    )
    return layer.forward(
        hidden_states,
        routing_map,
        probabilities,
        out,
        token_capacity=token_capacity,
        use_bounded_rows=use_bounded_rows,
    )


# The same for torch.compile. Custom ops take tensors, numbers and text only, so weights travel as their number.
_numbers = itertools.count()
_weights_of: "weakref.WeakValueDictionary[int, FlashInferRoutedNVFP4Weights]" = weakref.WeakValueDictionary()


@torch.library.custom_op("hexpert::flashinfer_routed_nvfp4_moe", mutates_args=())
def _moe(
    hidden_states: Tensor,
    routing_map: Tensor,
    probabilities: Tensor,
    weights: int,
    num_experts: int,
    local_expert_offset: int,
    activation: str,
    token_capacity: int | None,
    use_bounded_rows: bool,
) -> Tensor:
    routing = num_experts, local_expert_offset, activation
    inputs = hidden_states, routing_map, probabilities
    return _run(*inputs, None, _weights_of[weights], *routing, token_capacity, use_bounded_rows)


@_moe.register_fake
def _(hidden_states: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(hidden_states)


@torch.library.custom_op("hexpert::flashinfer_routed_nvfp4_moe_out", mutates_args=("out",))
def _moe_out(
    hidden_states: Tensor,
    routing_map: Tensor,
    probabilities: Tensor,
    out: Tensor,
    weights: int,
    num_experts: int,
    local_expert_offset: int,
    activation: str,
    token_capacity: int | None,
    use_bounded_rows: bool,
) -> None:
    routing = num_experts, local_expert_offset, activation
    inputs = hidden_states, routing_map, probabilities
    _run(*inputs, out, _weights_of[weights], *routing, token_capacity, use_bounded_rows)


@_moe_out.register_fake
def _(*_: Any) -> None:
    return None


def _check_tensor(name: str, given: Any) -> None:
    if not isinstance(given, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(given).__name__}")


def _integer(name: str, given: Any) -> int:
    try:
        return operator.index(given)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {given!r}") from None


def _activation(given: Any) -> _core.ActivationType:
    if isinstance(given, _core.ActivationType):
        if given in _ACTIVATIONS.values():
            return given
    else:
        found = _ACTIVATIONS.get(str(getattr(given, "name", given)).lower())
        if found is not None:
            return found
    raise UnsupportedError(f"activation_type: expected squared ReLU or SwiGLU, got {given!r}")
