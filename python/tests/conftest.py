"""Golden vectors and arrays for the tests of the package."""

import os
import zlib
from pathlib import Path

import numpy as np
import pytest

import hexpert

# jax would take most of a GPU's memory for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
DTYPES = {
    "u8": np.uint8,
    "u32": np.uint32,
    "i32": np.int32,
    "f32": np.float32,
    "f64": np.float64,
    "bf16": np.uint16,
}


def _read_golden():
    groups = {}
    for line in (GOLDEN / "manifest.tsv").read_text().splitlines()[1:]:
        group, case, array, dtype, shape, file, offset, size, crc = line.split("\t")
        data = (GOLDEN / file).read_bytes()[int(offset) : int(offset) + int(size)]
        assert zlib.crc32(data) == int(crc, 16), f"{group}/{case}/{array} is damaged"
        values = np.frombuffer(data, DTYPES[dtype]).reshape([int(n) for n in shape.split("x")])
        groups.setdefault(group, {}).setdefault(case, {})[array] = aligned(values)
    return groups


def aligned(values):
    """A copy on a 64-byte boundary."""
    memory = np.empty(values.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


GROUPS = _read_golden()


def golden_cases(group):
    return [pytest.param(case, arrays, id=case) for case, arrays in GROUPS[group].items()]


def bf16(values):
    """Bits of BF16, rounded to nearest even. Finite values only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return aligned(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Layer:
    """A small layer with inputs, as numpy arrays."""

    def __init__(self, experts=4, hidden=48, inter=40, gated=True, tokens=6, top_k=2, seed=0):
        random = np.random.default_rng(seed)
        self.fc1 = bf16(random.standard_normal((experts, (2 if gated else 1) * inter, hidden)) / 4)
        self.fc2 = bf16(random.standard_normal((experts, hidden, inter)) / 4)
        self.hidden_states = bf16(random.standard_normal((tokens, hidden)))
        self.routing_map = aligned(random.integers(-1, experts, (tokens, top_k), dtype=np.int32))
        self.probabilities = aligned(random.random((tokens, top_k), dtype=np.float32))
        self.problem = dict(
            max_tokens=tokens,
            top_k=top_k,
            num_experts=experts,
            activation=hexpert.ActivationType.SWIGLU if gated else hexpert.ActivationType.SQUARED_RELU,
        )

    @property
    def inputs(self):
        return self.hidden_states, self.routing_map, self.probabilities

    def weights(self):
        return hexpert.ExpertWeights.prepare(self.fc1, self.fc2)

    def plan(self, weights=None, **options):
        return hexpert.RoutedMoe.create(weights or self.weights(), **(self.problem | options))


@pytest.fixture
def layer():
    return Layer()
