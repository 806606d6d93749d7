"""Triton kernels for CUDA: convolution without patches; BatchNorm with what surrounds it, pooling and SGD in one pass.

Each has a twin in plain torch in `layers`, which is what runs elsewhere and what the tests compare with.
Reductions go through the same order in every launch, so that a run repeats to the bit.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["B", "top", "left"])
def _conv_forward(
    x,
    w,
    bias,
    y,
    B,
    top,
    left,
    w_q,
    w_i,
    w_j,
    H: tl.constexpr,
    W: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    CI: tl.constexpr,
    CO: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[m, co] = sum over taps and ci of x[m shifted by the tap, ci] w[tap, ci, co]; m = (oh, ow, b).

    With the place before the image in m, a tile lies in few rows of the map; taps that meet none of them are left out.
    """
    q = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(CO, BN)
    first = tl.program_id(0) // blocks * BM
    m = first + tl.arange(0, BM)
    n = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    inside_m, inside_n = m < B * OH * OW, n < CO
    b, place = m % B, m // B
    row, column = place // OW * STRIDE - top, place % OW * STRIDE - left
    highest = first // (B * OW) * STRIDE - top
    lowest = tl.minimum((first + BM - 1) // (B * OW), OH - 1) * STRIDE - top
    i_first, i_last = tl.maximum(0, -lowest), tl.minimum(KH - 1, H - 1 - highest)
    x += q * B * H * W * CI
    w += q * w_q
    acc = tl.zeros((BM, BN), tl.float32)
    if CI % BK == 0:
        PARTS: tl.constexpr = CI // BK
        for step in range(i_first * KW * PARTS, (i_last + 1) * KW * PARTS):
            tap = step // PARTS
            i, j = tap // KW, tap % KW
            k = step % PARTS * BK + tl.arange(0, BK)
            ih, iw = row + i, column + j
            there = inside_m & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
            at = ((b * H + ih) * W + iw) * CI
            one = tl.load(x + at[:, None] + k[None, :], mask=there[:, None], other=0.0)
            other = tl.load(w + i * w_i + j * w_j + k[:, None] * CO + n[None, :], mask=inside_n[None, :], other=0.0)
            acc = _dot(one, other, acc, PRECISION)
    else:
        for start in range(i_first * KW * CI, (i_last + 1) * KW * CI, BK):
            k = start + tl.arange(0, BK)
            tap, ci = k // CI, k % CI
            i, j = tap // KW, tap % KW
            there = inside_m[:, None] & (k < KH * KW * CI)[None, :]
            if PADDED:
                ih, iw = row[:, None] + i[None, :], column[:, None] + j[None, :]
                there = there & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
            at = ((b * H + row) * W + column) * CI
            one = tl.load(x + at[:, None] + ((i * W + j) * CI + ci)[None, :], mask=there, other=0.0)
            weight = i * w_i + j * w_j + ci * CO
            inside = (k < KH * KW * CI)[:, None] & inside_n[None, :]
            other = tl.load(w + weight[:, None] + n[None, :], mask=inside, other=0.0)
            acc = _dot(one, other, acc, PRECISION)
    if bias is not None:
        acc += tl.load(bias + q * CO + n, mask=inside_n, other=0.0)[None, :]
    y += q * B * OH * OW * CO
    out = (b * (OH * OW) + place) * CO
    tl.store(y + out[:, None] + n[None, :], acc, mask=inside_m[:, None] & inside_n[None, :])


@triton.jit(do_not_specialize=["B", "top", "left"])
def _conv_input_gradient(
    dy,
    w,
    dx,
    B,
    top,
    left,
    w_q,
    w_i,
    w_j,
    H: tl.constexpr,
    W: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    HS: tl.constexpr,
    WS: tl.constexpr,
    CI: tl.constexpr,
    CO: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dx[m, ci] = sum over taps and co of dy[m shifted back by the tap, co] w[tap, ci, co]; m = (ih, iw, b).

    Pixels are taken by their place modulo the stride: all of a program's meet the same taps, and no others are tried.
    """
    q = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    first_row, first_column = part // STRIDE, part % STRIDE
    i_first, j_first = (first_row + top) % STRIDE, (first_column + left) % STRIDE
    blocks = tl.cdiv(CI, BN)
    first = tl.program_id(0) // blocks * BM
    m = first + tl.arange(0, BM)
    n = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    b, place = m % B, m // B
    ih, iw = place // WS * STRIDE + first_row, place % WS * STRIDE + first_column
    inside_m, inside_n = (m < B * HS * WS) & (ih < H) & (iw < W), n < CI
    # tap i_first + u STRIDE of pixel ih reads dy at row (ih + top - i_first) / STRIDE - u
    row, column = (ih + top - i_first) // STRIDE, (iw + left - j_first) // STRIDE
    highest = (first // (B * WS) * STRIDE + first_row + top - i_first) // STRIDE
    last = tl.minimum((first + BM - 1) // (B * WS), HS - 1)
    lowest = (last * STRIDE + first_row + top - i_first) // STRIDE
    u_first = tl.maximum(0, highest - (OH - 1))
    u_last = tl.minimum((KH - 1 - i_first) // STRIDE, lowest)
    across = (KW - 1 - j_first) // STRIDE + 1
    dy += q * B * OH * OW * CO
    w += q * w_q
    acc = tl.zeros((BM, BN), tl.float32)
    PARTS: tl.constexpr = (CO + BK - 1) // BK
    if (i_first < KH) & (j_first < KW):
        for step in range(u_first * across * PARTS, (u_last + 1) * across * PARTS):
            tap = step // PARTS
            u, v = tap // across, tap % across
            k = step % PARTS * BK + tl.arange(0, BK)
            oh, ow = row - u, column - v
            there = inside_m & (oh >= 0) & (oh < OH) & (ow >= 0) & (ow < OW)
            at = ((b * OH + oh) * OW + ow) * CO
            weight = (i_first + u * STRIDE) * w_i + (j_first + v * STRIDE) * w_j
            if CO % BK == 0:
                one = tl.load(dy + at[:, None] + k[None, :], mask=there[:, None], other=0.0)
                other = tl.load(w + weight + n[:, None] * CO + k[None, :], mask=inside_n[:, None], other=0.0)
            else:
                inside_k = (k < CO)[None, :]
                one = tl.load(dy + at[:, None] + k[None, :], mask=there[:, None] & inside_k, other=0.0)
                other = tl.load(w + weight + n[:, None] * CO + k[None, :], mask=inside_n[:, None] & inside_k, other=0.0)
            acc = _dot(one, tl.trans(other), acc, PRECISION)
    dx += q * B * H * W * CI
    out = ((b * H + ih) * W + iw) * CI
    tl.store(dx + out[:, None] + n[None, :], acc, mask=inside_m[:, None] & inside_n[None, :])


@triton.jit(do_not_specialize=["top", "left"])
def _conv_weight_gradient(
    x,
    dy,
    dw,
    top,
    left,
    B: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    CI: tl.constexpr,
    CO: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dw[tap, ci, co] = sum over m of x[m shifted by the tap, ci] dy[m, co]; m = (oh, ow, b).

    With SPLITS > 1 each part of the sum has its own dw.
    """
    q = tl.program_id(1).to(tl.int64)
    K: tl.constexpr = KH * KW * CI
    blocks = tl.cdiv(CO, BN)
    first = tl.program_id(0) // blocks * BM
    k = first + tl.arange(0, BM)
    n = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    inside_k, inside_n = k < K, n < CO
    x += q * B * H * W * CI
    dy += q * B * OH * OW * CO
    acc = tl.zeros((BM, BN), tl.float32)
    if CI % BM == 0:  # one tap for the whole program: only the rows of the map that it meets
        i, j = first // CI // KW, first // CI % KW
        ci = first % CI + tl.arange(0, BM)
        oh_first = tl.maximum(0, (top - i + STRIDE - 1) // STRIDE)
        oh_last = tl.minimum(OH - 1, (H - 1 + top - i) // STRIDE)
        length = tl.cdiv(tl.cdiv((oh_last + 1 - oh_first) * OW * B, SPLITS), BK) * BK
        begin = oh_first * OW * B + tl.program_id(2) * length
        end = tl.minimum((oh_last + 1) * OW * B, begin + length)
        for start in range(begin, end, BK):
            m = start + tl.arange(0, BK)
            inside_m = m < end
            b, place = m % B, m // B
            ih, iw = place // OW * STRIDE - top + i, place % OW * STRIDE - left + j
            there = inside_m & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
            at = ((b * H + ih) * W + iw) * CI
            one = tl.load(x + at[:, None] + ci[None, :], mask=there[:, None], other=0.0)
            out = (b * (OH * OW) + place) * CO
            other = tl.load(dy + out[:, None] + n[None, :], mask=inside_m[:, None] & inside_n[None, :], other=0.0)
            acc = _dot(tl.trans(one), other, acc, PRECISION)
    else:
        tap, ci = k // CI, k % CI
        i, j = tap // KW, tap % KW
        length = tl.cdiv(tl.cdiv(B * OH * OW, SPLITS), BK) * BK
        begin = tl.program_id(2) * length
        end = tl.minimum(B * OH * OW, begin + length)
        for start in range(begin, end, BK):
            m = start + tl.arange(0, BK)
            inside_m = m < end
            b, place = m % B, m // B
            row, column = place // OW * STRIDE - top, place % OW * STRIDE - left
            there = inside_m[:, None] & inside_k[None, :]
            if PADDED:
                ih, iw = row[:, None] + i[None, :], column[:, None] + j[None, :]
                there = there & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
            at = ((b * H + row) * W + column) * CI
            one = tl.load(x + at[:, None] + ((i * W + j) * CI + ci)[None, :], mask=there, other=0.0)
            out = (b * (OH * OW) + place) * CO
            other = tl.load(dy + out[:, None] + n[None, :], mask=inside_m[:, None] & inside_n[None, :], other=0.0)
            acc = _dot(tl.trans(one), other, acc, PRECISION)
    dw += (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + q) * K * CO
    tl.store(dw + k[:, None] * CO + n[None, :], acc, mask=inside_k[:, None] & inside_n[None, :])


@triton.jit
def _norm_forward(
    x,
    weight,
    bias,
    mean,
    var,
    add,
    y,
    kept_mean,
    kept_inv,
    N,
    momentum,
    eps,
    C: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    RELU: tl.constexpr,
):
    """BatchNorm of [N, C] in training, plus `add`, then ReLU. Two passes for the statistics: no cancellation."""
    q = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside_c = c < C
    x += q * N * C
    y += q * N * C
    total = tl.zeros((BR, BC), tl.float32)
    for start in range(0, N, BR):
        r = start + tl.arange(0, BR)
        total += tl.load(x + r[:, None] * C + c[None, :], mask=(r < N)[:, None] & inside_c[None, :], other=0.0)
    m = tl.sum(total, 0) / N
    total = tl.zeros((BR, BC), tl.float32)
    for start in range(0, N, BR):
        r = start + tl.arange(0, BR)
        inside = (r < N)[:, None] & inside_c[None, :]
        centred = tl.load(x + r[:, None] * C + c[None, :], mask=inside, other=0.0) - m[None, :]
        total += tl.where(inside, centred * centred, 0.0)
    v = tl.sum(total, 0) / N
    inv = 1.0 / tl.sqrt(v + eps)
    at = q * C + c
    tl.store(kept_mean + at, m, mask=inside_c)
    tl.store(kept_inv + at, inv, mask=inside_c)
    old_mean, old_var = tl.load(mean + at, mask=inside_c, other=0.0), tl.load(var + at, mask=inside_c, other=0.0)
    unbiased = v * (N / tl.maximum(N - 1.0, 1.0))
    tl.store(mean + at, old_mean + momentum * (m - old_mean), mask=inside_c)
    tl.store(var + at, old_var + momentum * (unbiased - old_var), mask=inside_c)
    scale = tl.load(weight + at, mask=inside_c, other=0.0) * inv
    shift = tl.load(bias + at, mask=inside_c, other=0.0) - m * scale
    for start in range(0, N, BR):
        r = start + tl.arange(0, BR)
        inside = (r < N)[:, None] & inside_c[None, :]
        place = r[:, None] * C + c[None, :]
        z = tl.load(x + place, mask=inside, other=0.0) * scale[None, :] + shift[None, :]
        if add is not None:
            z += tl.load(add + q * N * C + place, mask=inside, other=0.0)
        if RELU:
            z = tl.where(z <= 0, 0.0, z)  # NaN stays NaN
        tl.store(y + place, z, mask=inside)


@triton.jit
def _norm_backward(
    dy,
    x,
    y,
    weight,
    mean,
    inv,
    dx,
    d_add,
    dweight,
    dbias,
    N,
    C: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    RELU: tl.constexpr,
):
    q = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside_c = c < C
    base = q * N * C
    at = q * C + c
    m, s = tl.load(mean + at, mask=inside_c, other=0.0), tl.load(inv + at, mask=inside_c, other=0.0)
    sum_g = tl.zeros((BR, BC), tl.float32)
    sum_gz = tl.zeros((BR, BC), tl.float32)
    for start in range(0, N, BR):
        r = start + tl.arange(0, BR)
        inside = (r < N)[:, None] & inside_c[None, :]
        place = base + r[:, None] * C + c[None, :]
        g = tl.load(dy + place, mask=inside, other=0.0)
        if RELU:
            g = tl.where(tl.load(y + place, mask=inside, other=0.0) > 0, g, 0.0)
        z = (tl.load(x + place, mask=inside, other=0.0) - m[None, :]) * s[None, :]
        sum_g += g
        sum_gz += g * z
    db, dw = tl.sum(sum_g, 0), tl.sum(sum_gz, 0)
    tl.store(dbias + at, db, mask=inside_c)
    tl.store(dweight + at, dw, mask=inside_c)
    scale = tl.load(weight + at, mask=inside_c, other=0.0) * s
    for start in range(0, N, BR):
        r = start + tl.arange(0, BR)
        inside = (r < N)[:, None] & inside_c[None, :]
        place = base + r[:, None] * C + c[None, :]
        g = tl.load(dy + place, mask=inside, other=0.0)
        if RELU:
            g = tl.where(tl.load(y + place, mask=inside, other=0.0) > 0, g, 0.0)
        if d_add is not None:
            tl.store(d_add + place, g, mask=inside)
        z = (tl.load(x + place, mask=inside, other=0.0) - m[None, :]) * s[None, :]
        tl.store(dx + place, scale[None, :] * (g - (db[None, :] + z * dw[None, :]) / N), mask=inside)


@triton.jit
def _pool_forward(x, y, TOTAL, H, W, OH, OW, C: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """y = the largest of each SIZE x SIZE window, at least 0; x: [N, H, W, C]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < TOTAL
    c, place = at % C, at // C
    ow, oh, n = place % OW, place // OW % OH, place // (OH * OW)
    corner = ((n * H + oh * SIZE) * W + ow * SIZE) * C + c
    best = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(SIZE):
        for j in tl.static_range(SIZE):
            value = tl.load(x + corner + (i * W + j) * C, mask=inside, other=0.0)
            best = tl.where((value > best) | (value != value), value, best)  # NaN stays NaN
    tl.store(y + at, best, mask=inside)


@triton.jit
def _pool_backward(dy, x, y, dx, TOTAL, H, W, OH, OW, C: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient goes to the first of a window that is its largest, if that is above 0."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < TOTAL
    c, place = at % C, at // C
    ow, oh, n = place % OW, place // OW % OH, place // (OH * OW)
    corner = ((n * H + oh * SIZE) * W + ow * SIZE) * C + c
    best = tl.load(y + at, mask=inside, other=0.0)
    g = tl.where(best > 0, tl.load(dy + at, mask=inside, other=0.0), 0.0)
    for i in tl.static_range(SIZE):
        for j in tl.static_range(SIZE):
            to = corner + (i * W + j) * C
            here = tl.load(x + to, mask=inside, other=0.0) == best
            tl.store(dx + to, tl.where(here, g, 0.0), mask=inside)
            g = tl.where(here, 0.0, g)


@triton.jit
def _descend(w, g, m, TOTAL, lr, momentum, decay, BLOCK: tl.constexpr):
    """m <- momentum m + g + decay w;  w <- w - lr m."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < TOTAL
    weight = tl.load(w + at, mask=inside)
    moment = momentum * tl.load(m + at, mask=inside) + tl.load(g + at, mask=inside) + decay * weight
    tl.store(m + at, moment, mask=inside)
    tl.store(w + at, weight - lr * moment, mask=inside)


@dataclass(frozen=True)
class Tile:
    """How a product of [M, K] and [K, N] is cut up."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


Job = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]
_jobs: list[Job] | None = None


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **sizes: Any) -> None:
    if _jobs is None:
        kernel[grid](*args, **sizes)
    else:
        _jobs.append((kernel, grid, args, sizes))


def compile_all(work: Callable[[], object]) -> None:
    """Compiles every kernel that `work` would launch, many at a time.

    Nothing is launched: what `work` computes is void, and must not be kept.
    """
    global _jobs
    jobs: list[Job] = []
    _jobs = jobs
    try:
        work()
    finally:
        _jobs = None
    different = {(job[0], tuple(job[3].items()), _kinds(job[2])): job for job in jobs}
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        compiling = [threads.submit(k.warmup, *args, grid=grid, **sizes) for k, grid, args, sizes in different.values()]
        for one in compiling:
            one.result()


def _kinds(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(v % 16 == 0 if isinstance(v, int) else v is None for v in args)


def _overhangs(pad: tuple[int, int], size: Sequence[int], taps: Sequence[int], stride: int, out: Sequence[int]) -> bool:
    """Does the kernel reach beyond the image somewhere?"""
    return any(p > 0 or (o - 1) * stride + k - p > n for p, n, k, o in zip(pad, size, taps, out, strict=True))


_MULTIPROCESSORS = 132  # of an H100 or H200; what the rules below were measured on


def forward_tile(clients: int, m: int, n: int, channels: int) -> Tile:
    """How a forward product is cut: a rule read off measurements on an H200, as are the two below."""
    if channels % 64:
        return Tile(32, 64, 32, 4, 4) if n > 32 else Tile(128, 32 if n > 16 else 16, 16, 4, 3)
    if m <= 32:
        wide = clients * -(-m // 16) * -(-n // 128) >= _MULTIPROCESSORS
        return Tile(16, 128, 64, 4, 3) if wide or channels % 128 else Tile(16, 64, 128, 4, 3)
    few = clients * -(-m // 64) * -(-n // 32) < 4 * _MULTIPROCESSORS
    return Tile(64, 32, 64, 4, 3) if m >= 512 and few else Tile(32, 64, 64, 4, 3)


def input_tile(clients: int, m: int, n: int, k: int) -> Tile:
    """How a product for the gradient of the input is cut; k is the number of channels of the output."""
    if n <= 32:
        return Tile(32, 32 if n > 16 else 16, 32 if k > 16 else 16, 2, 4)
    if m <= 32:
        return Tile(16, 128 if n >= 128 else 64, 64, 4, 3)
    many = clients * -(-m // 64) * -(-n // 64) >= _MULTIPROCESSORS
    return Tile(64, 64 if many else 32, 64, 4, 3)


def weight_tile(clients: int, m: int, n: int, k: int) -> tuple[Tile, int]:
    """How a product [k, n] for the gradient of the weights is cut, and into how many parts its sums of m terms."""
    if n < 64:
        tile = Tile(64 if k > 16 else 16, 32 if n > 16 else 16, 32 if k > 16 else 64, 2, 3)
    else:
        tile = Tile(32, 64, 32, 4, 3) if n < 128 else Tile(32, 128, 32 if m >= 64 else 16, 4, 2)
    programs = clients * -(-k // tile.m) * -(-n // tile.n)
    return tile, max(1, min(m // 1024, 4 * _MULTIPROCESSORS // programs))


def conv_forward(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: int, pad: tuple[int, int], out: tuple[int, int], precision: str
) -> Tensor:
    """x: [Q, B, H, W, CI] contiguous, w: [Q, KH, KW, CI, CO] -> [Q, B, OH, OW, CO]."""
    q, b, h, width, ci = x.shape
    kh, kw, co = w.shape[1], w.shape[2], w.shape[4]
    if precision == "tf32x3" and co <= 32:
        precision = "ieee"  # so few columns do not pay for splitting the factors
    bias = None if bias is None else bias.contiguous()
    m = b * out[0] * out[1]
    y = x.new_empty(q, b, *out, co)
    t = forward_tile(q, m, co, ci)
    grid = (-(-m // t.m) * -(-co // t.n), q)
    _launch(
        _conv_forward,
        grid,
        x,
        w,
        bias,
        y,
        b,
        *pad,
        w.stride(0),
        w.stride(1),
        w.stride(2),
        H=h,
        W=width,
        OH=out[0],
        OW=out[1],
        CI=ci,
        CO=co,
        KH=kh,
        KW=kw,
        STRIDE=stride,
        BM=t.m,
        BN=t.n,
        BK=t.k,
        PADDED=_overhangs(pad, (h, width), (kh, kw), stride, out),
        PRECISION=precision,
        num_warps=t.warps,
        num_stages=t.stages,
    )
    return y


def conv_input_gradient(
    dy: Tensor,
    w: Tensor,
    size: tuple[int, int],
    stride: int,
    pad: tuple[int, int],
    precision: str,
) -> Tensor:
    """dy: [Q, B, OH, OW, CO] contiguous -> [Q, B, *size, CI]."""
    q, b, oh, ow, co = dy.shape
    kh, kw, ci = w.shape[1:4]
    dx = dy.new_empty(q, b, *size, ci)
    hs, ws = -(-size[0] // stride), -(-size[1] // stride)
    m = b * hs * ws
    t = input_tile(q * stride * stride, m, ci, co)
    grid = (-(-m // t.m) * -(-ci // t.n), q, stride * stride)
    _launch(
        _conv_input_gradient,
        grid,
        dy,
        w,
        dx,
        b,
        *pad,
        w.stride(0),
        w.stride(1),
        w.stride(2),
        H=size[0],
        W=size[1],
        OH=oh,
        OW=ow,
        HS=hs,
        WS=ws,
        CI=ci,
        CO=co,
        KH=kh,
        KW=kw,
        STRIDE=stride,
        BM=t.m,
        BN=t.n,
        BK=t.k,
        PRECISION=precision,
        num_warps=t.warps,
        num_stages=t.stages,
    )
    return dx


def conv_weight_gradient(
    x: Tensor,
    dy: Tensor,
    taps: tuple[int, int],
    stride: int,
    pad: tuple[int, int],
    precision: str,
) -> Tensor:
    """x: [Q, B, H, W, CI], dy: [Q, B, OH, OW, CO], contiguous -> [Q, *taps, CI, CO]."""
    q, b, h, width, ci = x.shape
    oh, ow, co = dy.shape[2:]
    m = b * oh * ow
    k = taps[0] * taps[1] * ci
    t, splits = weight_tile(q, m, co, k)
    dw = x.new_empty(splits, q, *taps, ci, co)
    grid = (-(-k // t.m) * -(-co // t.n), q, splits)
    _launch(
        _conv_weight_gradient,
        grid,
        x,
        dy,
        dw,
        *pad,
        B=b,
        H=h,
        W=width,
        OH=oh,
        OW=ow,
        CI=ci,
        CO=co,
        KH=taps[0],
        KW=taps[1],
        STRIDE=stride,
        BM=t.m,
        BN=t.n,
        BK=t.k,
        SPLITS=splits,
        PADDED=_overhangs(pad, (h, width), taps, stride, (oh, ow)),
        PRECISION=precision,
        num_warps=t.warps,
        num_stages=t.stages,
    )
    return dw[0] if splits == 1 else dw.sum(0)


def _norm_blocks(n: int, c: int, most: int) -> tuple[int, int, int]:
    rows = min(triton.next_power_of_2(n), most)
    channels = min(triton.next_power_of_2(c), 16 if n >= 64 else 32 if n > 8 else 64)
    return rows, channels, 8 if n > 512 else 4 if rows * channels >= 2048 else 2


def norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    add: Tensor | None,
    relu: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """x: [Q, N, C] contiguous -> (y like x, mean [Q, C], 1 / deviation [Q, C]); running `mean` and `var` move."""
    q, n, c = x.shape
    weight, bias = weight.contiguous(), bias.contiguous()
    y, kept_mean, kept_inv = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    rows, channels, warps = _norm_blocks(n, c, 1024)
    _launch(
        _norm_forward,
        (-(-c // channels), q),
        x,
        weight,
        bias,
        mean,
        var,
        add,
        y,
        kept_mean,
        kept_inv,
        n,
        momentum,
        eps,
        C=c,
        BR=rows,
        BC=channels,
        RELU=relu,
        num_warps=warps,
    )
    return y, kept_mean, kept_inv


def norm_backward(
    dy: Tensor, x: Tensor, y: Tensor, weight: Tensor, mean: Tensor, inv: Tensor, relu: bool, add: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(dx, gradient of `add`, dweight, dbias)."""
    q, n, c = x.shape
    weight = weight.contiguous()
    dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    d_add = torch.empty_like(x) if add else None
    rows, channels, warps = _norm_blocks(n, c, 256)
    _launch(
        _norm_backward,
        (-(-c // channels), q),
        dy,
        x,
        y,
        weight,
        mean,
        inv,
        dx,
        d_add,
        dweight,
        dbias,
        n,
        C=c,
        BR=rows,
        BC=channels,
        RELU=relu,
        num_warps=warps,
    )
    return dx, d_add, dweight, dbias


def pool_forward(x: Tensor, size: int) -> Tensor:
    """x: [N, H, W, C] contiguous -> [N, H // size, W // size, C], windows side by side, followed by a ReLU."""
    n, h, w, c = x.shape
    y = x.new_empty(n, h // size, w // size, c)
    grid = (triton.cdiv(y.numel(), 1024),)
    _launch(_pool_forward, grid, x, y, y.numel(), h, w, h // size, w // size, C=c, SIZE=size, BLOCK=1024)
    return y


def pool_backward(dy: Tensor, x: Tensor, y: Tensor, size: int) -> Tensor:
    """The gradient with respect to x; rows and columns that no window covers get zero."""
    h, w, c = x.shape[1:]
    dx = torch.empty_like(x) if h % size == w % size == 0 else torch.zeros_like(x)
    grid = (triton.cdiv(y.numel(), 1024),)
    _launch(_pool_backward, grid, dy, x, y, dx, y.numel(), h, w, h // size, w // size, C=c, SIZE=size, BLOCK=1024)
    return dx


def descend(w: Tensor, g: Tensor, m: Tensor, lr: float, momentum: float, decay: float) -> None:
    """A step of SGD in one pass over weights, gradient and momentum, all contiguous; w and m change in place."""
    grid = (triton.cdiv(w.numel(), 2048),)
    _launch(_descend, grid, w, g, m, w.numel(), lr, momentum, decay, BLOCK=2048, num_warps=8)
