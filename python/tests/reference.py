"""NVFP4 in torch, written from docs/format.md alone: quantization, layouts, weight preparation and the layer.

One IEEE FP32 operation at a time, as the definition asks: tensor by tensor, since torch turns a division of a
Python number into a multiplication by a reciprocal.
"""

import torch
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FLT_MAX = torch.tensor(torch.finfo(torch.float32).max)
ONE_SIXTH = torch.tensor(0x3E2AAAAB, dtype=torch.int32).view(torch.float32)
FULL_RANGE = torch.tensor(2688.0)
ONE = torch.tensor(1.0)
NAN_SCALE = 0x7F


def e4m3(x: Tensor) -> Tensor:
    """FP32 >= 0 or NaN -> E4M3 byte: nearest, ties to even, saturating at 448, NaN 0x7F."""
    codes = torch.arange(127, dtype=torch.float64, device=x.device)
    exponent, mantissa = codes // 8, codes % 8
    values = torch.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    middles = (values[1:] + values[:-1]) / 2
    above = torch.searchsorted(middles, x.double().nan_to_num(0.0).contiguous(), right=True)  # ties up
    below = torch.searchsorted(middles, x.double().nan_to_num(0.0).contiguous(), right=False)  # ties down
    code = torch.where(above % 2 == 0, above, below)
    return torch.where(x.isnan(), NAN_SCALE, code).to(torch.uint8)


def e4m3_value(code: Tensor) -> Tensor:
    return code.view(torch.float8_e4m3fn).float()


def e2m1(v: Tensor) -> Tensor:
    """FP32 -> E2M1 code: sign bit kept, nearest, ties to even, saturating."""
    a = v.abs()
    inclusive = sum((a >= bound).to(torch.uint8) for bound in (0.75, 1.75, 3.5))
    exclusive = sum((a > bound).to(torch.uint8) for bound in (0.25, 1.25, 2.5, 5.0))
    return inclusive + exclusive + 8 * torch.signbit(v).to(torch.uint8)


def pack(codes: Tensor) -> Tensor:
    return codes[..., ::2] | codes[..., 1::2] << 4


def quantize(x: Tensor, per_row: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, cols] bf16, cols % 16 == 0 -> packed codes, linear block scales, FP32 outer scales.

    FlashInfer's rule without fast math. transformer_engine() is the other source.
    """
    x = x.float()
    amax = x.abs().amax(1) if per_row else x.abs().amax().reshape(1)  # NaN wins
    encode = torch.minimum(FULL_RANGE / amax, FLT_MAX)
    encode = torch.where(encode == 0, ONE, encode)  # infinity in x
    decode = ONE / encode
    blocks = x.view(x.shape[0], -1, 16)
    scales = e4m3(blocks.abs().amax(2) * (encode * ONE_SIXTH)[:, None])
    inner = torch.minimum(ONE / (e4m3_value(scales) * decode[:, None]), FLT_MAX)
    codes = e2m1((blocks * inner[..., None]).view_as(x))
    poisoned = amax.isnan()
    codes = torch.where(poisoned[:, None], 0, codes)
    scales = torch.where(poisoned[:, None], NAN_SCALE, scales)
    outer = torch.where(amax == 0, torch.tensor(0.0 if per_row else 1.0), decode)
    return pack(codes), scales.to(torch.uint8), torch.where(poisoned, torch.nan, outer)


def transformer_engine(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Transformer Engine's reference quantizer, for one matrix. Differs in zeros alone: code 0 for -0.0, and a matrix
    of zeros has the encode scale FLT_MAX."""
    blocks = x.float().view(x.shape[0], -1, 16)
    encode = torch.minimum(FULL_RANGE / blocks.abs().amax(), FLT_MAX)
    encode = torch.where(encode == 0, ONE, encode)
    decode = ONE / encode
    scales = (blocks.abs().amax(2, keepdim=True) * (encode * ONE_SIXTH)).clamp(max=448).to(torch.float8_e4m3fn)
    v = (blocks * torch.minimum(ONE / (scales.float() * decode), FLT_MAX)).clamp(-6, 6)
    codes = torch.zeros(v.shape, dtype=torch.uint8)
    ends = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0)
    for code, (low, high) in enumerate(zip((0.0, *ends), ends)):
        for sign, a in ((0, v), (8, -v)):
            # An even code has both ends of its interval, 0 without its sign.
            inside = (low <= a) & (a <= high) if code % 2 == 0 else (low < a) & (a < high)
            if code == 7:
                inside = (low < a) & (a <= high)
            codes[inside & ((sign == 0) | (v < 0))] = code + sign
    return pack(codes.view_as(x)), scales.view(torch.uint8).squeeze(2), decode.reshape(1)


def four_over_six(x: Tensor, per_row: bool, squared: bool, e4m3_max: int) -> tuple[Tensor, Tensor, Tensor]:
    """As quantize(), by FlashInfer's other rule: a block's maximum becomes 6 or 4, whichever errs less. Finite x."""
    x = x.float()
    full_range = torch.tensor(6.0 * e4m3_max)
    amax = x.abs().amax(1) if per_row else x.abs().amax().reshape(1)
    encode = torch.minimum(full_range / amax, FLT_MAX)
    decode = ONE / encode
    blocks = x.view(x.shape[0], -1, 16)
    largest = blocks.abs().amax(2)
    base = largest / torch.tensor(6.0) * encode[:, None]

    def candidate(scales):
        scale = e4m3_value(scales)
        inner = torch.minimum(ONE / (scale * decode[:, None]), FLT_MAX)
        codes = e2m1(blocks * inner[..., None])
        value = E2M1[(codes & 7).long()] * (1 - 2 * (codes >> 3).float()) * scale[..., None]
        value = value * amax[:, None, None] / full_range if per_row else value * decode
        difference = value - blocks
        terms = (difference * difference if squared else difference.abs()).unbind(-1)
        return codes, scales, sum(terms[1:], terms[0])  # in this order

    codes, scales, error = candidate(e4m3(base))
    codes4, scales4, error4 = candidate(e4m3(base * torch.tensor(1.5)))
    codes = torch.where((error4 < error)[..., None], codes4, codes)
    codes = torch.where((largest == 0)[..., None], 0, codes)
    outer = torch.where(amax == 0, torch.tensor(0.0 if per_row else 1.0), decode)
    return pack(codes.view_as(x)), torch.where(error4 < error, scales4, scales), outer


def tiled(scales: Tensor, tile_rows: int) -> Tensor:
    """Linear scales [rows, columns] in 128x4 (tile_rows 128) or 8x4 order, padding 0."""
    rows, columns = scales.shape
    padded = torch.zeros(-(-rows // tile_rows) * tile_rows, -(-columns // 4) * 4, dtype=torch.uint8)
    padded[:rows, :columns] = scales
    if tile_rows == 8:
        return padded.view(-1, 8, padded.shape[1] // 4, 4).permute(0, 2, 1, 3).reshape(-1)
    split = padded.view(-1, 4, 32, padded.shape[1] // 4, 4)  # row = 128 tile + 32 b + a
    return split.permute(0, 3, 2, 1, 4).reshape(-1)


def values(packed: Tensor, scales: Tensor, outer: Tensor) -> Tensor:
    """FP64 values of codes with linear scales."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    magnitude = E2M1.double().to(packed.device)[codes & 7] * (1 - 2 * (codes >> 3))
    return magnitude * e4m3_value(scales).double().repeat_interleave(16, -1) * outer.double()[:, None]


def padded(x: Tensor, rows: int, cols: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, cols - x.shape[1], 0, rows - x.shape[0]))


def up(n: int, multiple: int = 256) -> int:
    return -(-n // multiple) * multiple


def prepare(fc1: Tensor, fc2: Tensor) -> dict[str, Tensor]:
    """Canonical weights of BF16 stacks."""
    inter, hidden = fc2.shape[2], fc2.shape[1]
    stacks = {"fc1": [], "fc2": []}
    for first, second in zip(fc1, fc2):
        if first.shape[0] == 2 * inter:
            gate, above = (padded(half, up(inter), up(hidden)) for half in first.split(inter))
            first = torch.stack((above.view(-1, 64, up(hidden)), gate.view(-1, 64, up(hidden))), 1)
            first = first.reshape(-1, up(hidden))
        stacks["fc1"].append(padded(first, up(first.shape[0]), up(hidden)))
        stacks["fc2"].append(padded(second, up(hidden), up(inter)))
    out = {}
    for name, matrices in stacks.items():
        quantized = [quantize(matrix, per_row=False) for matrix in matrices]
        out[f"{name}_data"] = torch.stack([codes for codes, _, _ in quantized])
        out[f"{name}_scale_swizzled"] = torch.stack(
            [tiled(scales, 128).view(scales.shape) for _, scales, _ in quantized]
        )
        out[f"{name}_alpha"] = torch.cat([alpha for _, _, alpha in quantized])
    return out


def matrix_values(matrix: Tensor) -> Tensor:
    """What NVFP4 makes of a weight matrix [rows, cols], any cols: FP64."""
    cols = matrix.shape[1]
    return values(*quantize(padded(matrix, matrix.shape[0], up(cols, 16)), per_row=False))


def swiglu(gate: Tensor, above: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * above


def swiglu_oai(alpha: float, beta: float, limit: float):
    def activation(gate, above):
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(alpha * gate) * (above.clamp(-limit, limit) + beta)

    return activation


def geglu_tanh(gate: Tensor, above: Tensor) -> Tensor:
    return torch.nn.functional.gelu(gate, approximate="tanh") * above


def situ(b: float, c: float | None):
    def activation(gate, above):
        return b * torch.tanh(gate / b) * torch.sigmoid(gate) * (above if c is None else c * torch.tanh(above / c))

    return activation


def forward(fc1, fc2, x, ids, probabilities, offset=0, activation=swiglu) -> Tensor:
    """The layer with sums in FP64: [T, H]. `activation` is that of gated experts."""
    experts, inter, hidden = fc2.shape[0], fc2.shape[2], fc2.shape[1]
    gated = fc1.shape[1] == 2 * inter
    x = values(*quantize(padded(x, x.shape[0], up(hidden, 16)), per_row=True))
    out = torch.zeros(x.shape[0], hidden, dtype=torch.float64, device=x.device)
    for expert in range(experts):
        tokens, slots = (ids == expert + offset).nonzero(as_tuple=True)
        if tokens.numel() == 0:
            continue
        z = x[tokens] @ matrix_values(fc1[expert]).T
        if gated:
            gate, above = z.chunk(2, 1)
            h = activation(gate, above)
        else:
            h = z.clamp(min=0).square()
        h = padded(h.bfloat16(), h.shape[0], up(inter, 16))
        h = values(*quantize(h, per_row=True))
        routes = (h @ matrix_values(fc2[expert]).T).bfloat16().double()
        out.index_add_(0, tokens, routes * probabilities[tokens, slots].double()[:, None])
    return out
