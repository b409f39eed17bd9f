"""Tests that need no GPU: TRITON_INTERPRET=1 python -m pytest bench/peers"""

import os
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1", allow_module_level=True)
sys.path.insert(0, os.path.dirname(__file__))

import compare
import kernels
import layers
from problem import MODELS, random_call, relative_error


SIZES = [(5, 8, 16), (700, 128, 16), (64, 40, 1), (1500, 256, 32), (1500, 128, 1)]


@pytest.mark.parametrize("routes, experts, rows", SIZES)
def test_alignment(routes, experts, rows):
    plan = kernels.Alignment(routes, experts, rows, "cpu")
    for seed in range(2):  # the counters must be as before after a run
        ids = torch.randint(0, experts, (routes,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
        plan.run(ids)
        counts = torch.bincount(ids.long(), minlength=experts)
        sizes = (counts + rows - 1) // rows * rows
        padded = int(plan.padded)
        assert padded == int(sizes.sum())
        routes_at = plan.sorted_ids[:padded].long()
        valid = routes_at < routes
        assert routes_at[valid].sort().values.equal(torch.arange(routes))
        if rows > 1:
            assert (routes_at[~valid] == routes).all()
            experts_at = plan.expert_ids[: padded // rows].repeat_interleave(rows)
            assert experts_at[valid].equal(ids[routes_at[valid]])
        else:
            assert plan.offsets[: experts + 1].tolist() == [0, *counts.cumsum(0).tolist()]
            assert routes_at[plan.positions.long()].equal(torch.arange(routes))


@pytest.mark.parametrize("peer", ["torch", "triton"])
@pytest.mark.parametrize("name, tokens", [("tiny", 1), ("tiny", 5), ("tiny-relu", 3)])
def test_layer(peer, name, tokens, monkeypatch):
    monkeypatch.setattr(layers, "copies_of", lambda _: 2)
    model = MODELS[name]
    weights_class, layer_class = layers.PEERS[peer]
    weights = weights_class(model, "cpu", 1)
    layer = layer_class(model, weights, "cpu")
    call = random_call(model, "zipf", tokens, 3, "cpu")
    out = torch.full((tokens, model.hidden_size), float("nan"))
    for forward in layer.variants(tokens, [call, call]).values():
        forward(1, call, out)
        assert relative_error(model, call, out, lambda e: weights.expert(1, e)) < 1e-5
        out *= 1.03
        assert relative_error(model, call, out, lambda e: weights.expert(1, e)) > 0.02


def test_gather_and_combine():
    x = torch.randn(6, 96)
    order = torch.randperm(12).int()
    gathered = torch.empty(12, 96)
    kernels.gather(x, order, 2, gathered)
    assert gathered.equal(x[(order // 2).long()])
    positions = order.long().argsort().int()
    weights = torch.rand(6, 2)
    out = torch.empty(6, 96)
    kernels.combine(gathered, weights, positions, out)
    torch.testing.assert_close(out, x * weights.sum(1, keepdim=True))


def test_dequantize():
    codes = torch.tensor([[0x21, 0x7F, 0x90, 0, 0, 0, 0, 0]], dtype=torch.uint8)
    scales = torch.tensor([[0x40]], dtype=torch.uint8)  # 2 in E4M3
    row = layers.dequantize(codes, scales, torch.tensor(0.25))[0].tolist()
    assert row[:6] == [0.25, 0.5, -3.0, 3.0, 0.0, -0.25]


def test_compare():
    hexpert = {("m", 1, "uniform"): 10.0, ("m", 8, "uniform"): 20.0, ("n", 1, "uniform"): 5.0}
    peers = {("m", 1, "uniform"): {"a": 20.0, "b": 30.0}, ("m", 8, "uniform"): {"a": 160.0}}
    text = compare.table(hexpert, peers)
    assert "| m | 1 | 10.0 | 20.0 | 30.0 | 2.00 (a) |" in text
    assert "|  | 8 | 20.0 | 160.0 | - | 8.00 (a) |" in text
    assert "| m | 2 | 4.00 | 4.00 | 3.00 |" in text
    assert "| all | 2 | 4.00 | 4.00 | 3.00 |" in text
