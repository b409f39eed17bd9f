"""Triton kernels: sorting of routes, grouped GEMM, activation, gather and sum."""

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

SMALL_ROUTES = 1024  # up to here one block sorts
SIZES = ["routes", "capacity", "blocks", "share", "E", "ROWS"]
warming = False  # kernels are compiled, not launched


def launch(kernel, grid, *args, **kwargs):
    if warming:
        kernel.warmup(*args, grid=grid, **kwargs)
    else:
        kernel[grid](*args, **kwargs)


@triton.jit(do_not_specialize=SIZES)
def sort_small(
    ids, counters, starts, sorted_ids, expert_ids, padded, offsets, positions, routes, capacity, blocks, E, ROWS,
    BINS: tl.constexpr, ROUTES: tl.constexpr, BLOCKED: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, ROUTES)
    bins = tl.arange(0, BINS)
    valid = i < routes
    e = tl.load(ids + i, mask=valid, other=BINS - 1)
    rank = tl.atomic_add(counters + e, 1, mask=valid, sem="relaxed")
    count = tl.where(bins < E, tl.histogram(e, BINS), 0)
    size = (count + ROWS - 1) // ROWS * ROWS
    end = tl.cumsum(size, 0)
    tl.store(starts + bins, end - size)
    tl.store(offsets + bins, end - size, mask=bins <= E)
    tl.store(padded, tl.sum(size, 0))
    if BLOCKED:
        for first in range(0, capacity, FILL):
            slot = first + tl.arange(0, FILL)
            tl.store(sorted_ids + slot, tl.zeros([FILL], tl.int32) + routes, mask=slot < capacity)
    tl.debug_barrier()
    position = tl.load(starts + e, mask=valid, other=0) + rank
    tl.store(sorted_ids + position, i, mask=valid)
    tl.store(positions + i, position, mask=valid)
    tl.store(counters + bins, tl.zeros([BINS], tl.int32))
    if BLOCKED:
        for first in range(0, blocks, 32):
            block = first + tl.arange(0, 32)
            before = (end[None, :] <= (block * ROWS)[:, None]) & (bins < E)[None, :]
            expert = tl.minimum(tl.sum(before.to(tl.int32), 1), E - 1)
            tl.store(expert_ids + block, expert, mask=block < blocks)


@triton.jit(do_not_specialize=SIZES)
def rank_routes(
    ids, counters, ranks, sorted_ids, routes, capacity, share,
    BINS: tl.constexpr, ROUTES: tl.constexpr, BLOCKED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    i = pid * ROUTES + tl.arange(0, ROUTES)
    valid = i < routes
    e = tl.load(ids + i, mask=valid, other=BINS - 1)
    rank = tl.atomic_add(counters + e, 1, mask=valid, sem="relaxed")
    tl.store(ranks + i, rank, mask=valid)
    if BLOCKED:
        for first in range(0, share, ROUTES):
            within = first + tl.arange(0, ROUTES)
            slot = pid * share + within
            none = tl.zeros([ROUTES], tl.int32) + routes
            tl.store(sorted_ids + slot, none, mask=(within < share) & (slot < capacity))


@triton.jit(do_not_specialize=SIZES)
def place_routes(
    ids, counters, starts, ranks, sorted_ids, expert_ids, padded, offsets, positions, routes, blocks, share, E, ROWS,
    BINS: tl.constexpr, ROUTES: tl.constexpr, BLOCKED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    bins = tl.arange(0, BINS)
    count = tl.load(counters + bins, mask=bins < E, other=0)
    size = (count + ROWS - 1) // ROWS * ROWS
    end = tl.cumsum(size, 0)
    own = starts + pid * BINS
    tl.store(own + bins, end - size)
    if pid == 0:
        tl.store(offsets + bins, end - size, mask=bins <= E)
        tl.store(padded, tl.sum(size, 0))
    tl.debug_barrier()
    i = pid * ROUTES + tl.arange(0, ROUTES)
    valid = i < routes
    e = tl.load(ids + i, mask=valid, other=0)
    position = tl.load(own + e, mask=valid, other=0) + tl.load(ranks + i, mask=valid, other=0)
    tl.store(sorted_ids + position, i, mask=valid)
    tl.store(positions + i, position, mask=valid)
    if BLOCKED:
        for first in range(0, share, 32):
            within = first + tl.arange(0, 32)
            block = pid * share + within
            before = (end[None, :] <= (block * ROWS)[:, None]) & (bins < E)[None, :]
            expert = tl.minimum(tl.sum(before.to(tl.int32), 1), E - 1)
            tl.store(expert_ids + block, expert, mask=(within < share) & (block < blocks))


class Alignment:
    """Routes sorted by expert, every expert padded to a multiple of `rows`.

    After run: `sorted_ids` [padded] has routes, and the number of routes where there is none; `expert_ids` an expert
    for every `rows` of them; `padded` their number. With rows 1 also `offsets` [num_experts + 1], where experts start,
    and `positions` [routes], where every route went."""

    def __init__(self, routes, num_experts, rows, device):
        self.routes = routes
        self.num_experts = num_experts
        self.rows = rows
        self.bins = max(32, triton.next_power_of_2(num_experts + 1))
        self.blocks = (routes + min(routes, num_experts) * (rows - 1)) // rows
        self.capacity = self.blocks * rows
        self.programs = triton.cdiv(routes, SMALL_ROUTES)

        def new(count):
            return torch.zeros(count, dtype=torch.int32, device=device)

        self.sorted_ids = new(self.capacity)
        self.expert_ids = new(self.blocks if rows > 1 else 1)
        self.padded = new(1)
        self.offsets = new(self.bins)
        self.positions = new(routes)
        self.ranks = new(routes)
        self.counters = new(self.bins)
        self.starts = new(self.bins * self.programs)

    def run(self, routing_map):
        blocked = self.rows > 1
        if self.routes <= SMALL_ROUTES:
            size = 64 if self.routes <= 64 else 256 if self.routes <= 256 else SMALL_ROUTES
            launch(
                sort_small, (1,),
                routing_map, self.counters, self.starts, self.sorted_ids, self.expert_ids, self.padded, self.offsets,
                self.positions, self.routes, self.capacity, self.blocks, self.num_experts, self.rows,
                BINS=self.bins, ROUTES=size, BLOCKED=blocked, FILL=1024, num_warps=min(16, size // 32),
            )  # fmt: skip
            return
        self.counters.zero_()
        share = triton.cdiv(self.capacity, self.programs)
        launch(
            rank_routes, (self.programs,),
            routing_map, self.counters, self.ranks, self.sorted_ids, self.routes, self.capacity, share,
            BINS=self.bins, ROUTES=SMALL_ROUTES, BLOCKED=blocked, num_warps=8,
        )  # fmt: skip
        launch(
            place_routes, (self.programs,),
            routing_map, self.counters, self.starts, self.ranks, self.sorted_ids, self.expert_ids, self.padded,
            self.offsets, self.positions, self.routes, self.blocks, triton.cdiv(self.blocks, self.programs),
            self.num_experts, self.rows,
            BINS=self.bins, ROUTES=SMALL_ROUTES, BLOCKED=blocked, num_warps=8,
        )  # fmt: skip


@triton.jit(do_not_specialize=["routes", "per_token"])
def gemm_kernel(
    a, b, c, weights, sorted_ids, expert_ids, padded, routes, per_token, N, K, expert_stride,
    WEIGHTED: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tiles_m = tl.load(padded) // BM
    tiles_n = tl.cdiv(N, BN)
    if pid >= tiles_m * tiles_n:
        return
    in_group = GROUP * tiles_n
    first_m = pid // in_group * GROUP
    group_m = tl.minimum(tiles_m - first_m, GROUP)
    tile_m = first_m + pid % in_group % group_m
    tile_n = pid % in_group // group_m

    route = tl.load(sorted_ids + tile_m * BM + tl.arange(0, BM))
    valid = route < routes
    expert = tl.load(expert_ids + tile_m).to(tl.int64)
    column = (tile_n * BN + tl.arange(0, BN)) % N
    k = tl.arange(0, BK)
    row = (tl.where(valid, route, 0) // per_token).to(tl.int64)
    a_ptr = a + row[:, None] * K + k[None, :]
    b_ptr = b + expert * expert_stride + column.to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(0, tl.cdiv(K, BK)):
        if EVEN_K:
            x = tl.load(a_ptr, mask=valid[:, None], other=0.0)
            w = tl.load(b_ptr)
        else:
            x = tl.load(a_ptr, mask=valid[:, None] & (k[None, :] < K - i * BK), other=0.0)
            w = tl.load(b_ptr, mask=k[:, None] < K - i * BK, other=0.0)
        acc = tl.dot(x, w, acc)
        a_ptr += BK
        b_ptr += BK
    if WEIGHTED:
        acc *= tl.load(weights + route, mask=valid, other=0.0)[:, None]
    column = tile_n * BN + tl.arange(0, BN)
    c_ptr = c + route.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(c_ptr, acc.to(c.dtype.element_ty), mask=valid[:, None] & (column < N)[None, :])


@dataclass(frozen=True)
class Tile:
    rows: int
    cols: int
    depth: int
    group: int
    warps: int
    stages: int

    def __str__(self):
        return f"{self.rows}x{self.cols}x{self.depth}/{self.warps}w{self.stages}s"


TILES = (
    Tile(16, 64, 128, 1, 4, 4),
    Tile(16, 64, 256, 1, 4, 3),
    Tile(16, 128, 64, 1, 4, 5),
    Tile(16, 128, 128, 1, 4, 3),
    Tile(32, 64, 128, 1, 4, 4),
    Tile(32, 128, 64, 1, 4, 4),
    Tile(32, 128, 128, 1, 8, 3),
    Tile(64, 64, 128, 1, 4, 4),
    Tile(64, 128, 64, 8, 4, 4),
    Tile(64, 256, 64, 8, 4, 4),
    Tile(128, 128, 64, 16, 8, 4),
    Tile(128, 256, 64, 16, 8, 3),
    Tile(128, 256, 64, 16, 8, 4),
)


def tiles_for(tokens_per_expert):
    """Candidates by rows of a tile."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return {16: [Tile(16, 32, 32, 1, 4, 2)], 32: [Tile(32, 64, 64, 8, 4, 2)]}
    if tokens_per_expert <= 4:
        wanted = (16,)
    elif tokens_per_expert <= 24:
        wanted = (16, 32)
    elif tokens_per_expert <= 48:
        wanted = (32, 64)
    else:
        wanted = (64, 128)
    return {rows: [tile for tile in TILES if tile.rows == rows] for rows in wanted}


def gemm(a, b, c, plan, per_token, weights, tile):
    """c[route] = a[route // per_token] @ b[expert of route].T, times weights[route] where there are weights."""
    n, k = b.shape[1:]
    grid = (plan.blocks * triton.cdiv(n, tile.cols),)
    launch(
        gemm_kernel, grid,
        a, b, c, c if weights is None else weights, plan.sorted_ids, plan.expert_ids, plan.padded, plan.routes,
        per_token, n, k, n * k,
        WEIGHTED=weights is not None, EVEN_K=k % tile.depth == 0,
        BM=tile.rows, BN=tile.cols, BK=tile.depth, GROUP=tile.group, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit
def activation_kernel(h, a, COLS, GATED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < COLS
    if GATED:
        gate = tl.load(h + row * (2 * COLS) + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(h + row * (2 * COLS) + COLS + at, mask=inside, other=0.0).to(tl.float32)
        value = gate / (1 + tl.exp(-gate)) * up
    else:
        value = tl.load(h + row * COLS + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.maximum(value, 0.0)
        value = value * value
    tl.store(a + row * COLS + at, value.to(a.dtype.element_ty), mask=inside)


def activate(h, a, gated):
    rows, cols = a.shape
    launch(activation_kernel, (rows, triton.cdiv(cols, 1024)), h, a, cols, GATED=gated, BLOCK=1024, num_warps=4)


@triton.jit(do_not_specialize=["top_k"])
def gather_kernel(x, sorted_ids, out, COLS, top_k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = (tl.load(sorted_ids + row) // top_k).to(tl.int64)
    value = tl.load(x + token * COLS + at, mask=at < COLS, other=0.0)
    tl.store(out + row * COLS + at, value, mask=at < COLS)


def gather(x, sorted_ids, top_k, out):
    rows, cols = out.shape
    grid = (rows, triton.cdiv(cols, 1024))
    launch(gather_kernel, grid, x, sorted_ids, out, cols, top_k, BLOCK=1024, num_warps=4)


@triton.jit
def combine_kernel(
    y, weights, positions, out, COLS,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, PERMUTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < COLS
    acc = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(TOP_K):
        route = token * TOP_K + s
        row = route
        if PERMUTED:
            row = tl.load(positions + route).to(tl.int64)
        value = tl.load(y + row * COLS + at, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + route)
        acc += value
    tl.store(out + token * COLS + at, acc.to(out.dtype.element_ty), mask=inside)


def combine(y, weights, positions, out):
    """out[token] = sum of y[row of a route] over the routes of a token, weighted where there are weights."""
    tokens, cols = out.shape
    launch(
        combine_kernel, (tokens, triton.cdiv(cols, 512)),
        y, y if weights is None else weights, y if positions is None else positions, out, cols,
        TOP_K=y.shape[0] // tokens, WEIGHTED=weights is not None, PERMUTED=positions is not None,
        BLOCK=512, num_warps=4,
    )  # fmt: skip
