"""NVFP4 quantize-and-dequantize with exact FP32 math: docs/format.md sections 1 to 3.

Written for evaluation, independently of the C++ library. `python nvfp4.py ../../tests/golden`
compares it with the golden vectors.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

BLOCK = 16
ONE = torch.tensor(1.0)
FULL_RANGE = torch.tensor(6.0 * 448.0)
ONE_SIXTH = torch.tensor(np.uint32(0x3E2AAAAB).view(np.float32))
FLT_MAX = torch.tensor(torch.finfo(torch.float32).max)
MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
TIE_GOES_UP = torch.tensor([False, True, False, True, False, True, False])  # to the even code
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def quantize(x: Tensor, per_row: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, cols], finite FP32 of BF16 values, cols a multiple of 16.

    Returns codes [rows, cols] u8, block scales [rows, cols / 16] FP32, outer scale [rows or 1] FP32.
    """
    amax = x.abs().amax(1) if per_row else x.abs().max()[None]
    # Tensor by tensor: `number / tensor` multiplies by a reciprocal, which rounds twice.
    encode = torch.minimum(FULL_RANGE / amax, FLT_MAX)
    decode = ONE / encode
    blocks = x.view(x.shape[0], -1, BLOCK)
    raw = blocks.abs().amax(2) * (encode * ONE_SIXTH)[:, None]
    scales = raw.clamp(max=448.0).to(torch.float8_e4m3fn).float()
    multiplier = torch.minimum(ONE / (scales * decode[:, None]), FLT_MAX)
    scaled = blocks * multiplier[..., None]
    magnitude = scaled.abs()[..., None]
    codes = ((magnitude > MIDPOINTS) | ((magnitude == MIDPOINTS) & TIE_GOES_UP)).sum(-1)
    codes += 8 * torch.signbit(scaled)
    outer = torch.where(amax == 0, 0.0 if per_row else 1.0, decode)
    return codes.view_as(x).to(torch.uint8), scales, outer


def round_trip(x: Tensor, per_row: bool) -> Tensor:
    """x [rows, cols], any cols, as NVFP4 represents it: FP64."""
    cols = x.shape[1]
    padded = torch.nn.functional.pad(x.float(), (0, -cols % BLOCK))
    codes, scales, outer = quantize(padded, per_row)
    values = E2M1.double()[(codes & 7).long()] * (1 - 2 * (codes >> 3).double())
    values *= scales.double().repeat_interleave(BLOCK, 1) * outer.double()[:, None]
    return values[:, :cols]


def check_golden(folder: Path) -> None:
    arrays = {}
    for line in (folder / "manifest.tsv").read_text().splitlines()[1:]:
        group, case, array, dtype, shape, file, offset, size, _ = line.split("\t")
        if group in ("per_tensor", "per_token"):
            data = (folder / file).read_bytes()[int(offset) : int(offset) + int(size)]
            kind = {"bf16": np.uint16, "u8": np.uint8, "f32": np.float32}[dtype]
            values = np.frombuffer(data, kind).reshape([int(n) for n in shape.split("x")])
            arrays.setdefault((group, case), {})[array] = values
    checked = 0
    for (group, case), golden in arrays.items():
        x = torch.from_numpy((golden["x"].astype(np.uint32) << 16).view(np.float32))
        if not x.isfinite().all():
            continue
        x = torch.nn.functional.pad(x, (0, 2 * golden["data"].shape[1] - x.shape[1]))
        codes, scales, outer = quantize(x, per_row=group == "per_token")
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        scale_bytes = scales.to(torch.float8_e4m3fn).view(torch.uint8)
        want = golden["row_scale" if group == "per_token" else "alpha"]
        same = (
            np.array_equal(packed.numpy(), golden["data"])
            and np.array_equal(scale_bytes.numpy(), golden["scale_linear"])
            and np.array_equal(outer.numpy(), want)
        )
        if not same:
            sys.exit(f"{group}/{case}: differs from the golden vector")
        checked += 1
    print(f"{checked} golden cases equal")


if __name__ == "__main__":
    check_golden(Path(sys.argv[1]))
