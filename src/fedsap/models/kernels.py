"""Triton kernels for CUDA: convolution without patches, and BatchNorm with what surrounds it in one pass.

Each has a twin in plain torch in `layers`, which is what runs elsewhere and what the tests compare with.
Reductions go through the same order in every launch, so that a run repeats to the bit.
"""

from dataclasses import dataclass

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


@triton.jit
def _conv_forward(
    x, w, bias, y,
    M, top, left, w_q, w_i, w_j,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[m, co] = sum over taps and ci of x[m shifted by the tap, ci] w[tap, ci, co]; m = (b, oh, ow)."""
    q = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(CO, BN)
    m = tl.program_id(0) // blocks * BM + tl.arange(0, BM)
    n = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    b, place = m // (OH * OW), m % (OH * OW)
    row, column = place // OW * STRIDE - top, place % OW * STRIDE - left
    x += q * (M // (OH * OW)) * H * W * CI
    w += q * w_q
    acc = tl.zeros((BM, BN), tl.float32)
    inside_m, inside_n = m < M, n < CO
    if CI % BK == 0:
        for tap in range(KH * KW):
            i, j = tap // KW, tap % KW
            ih, iw = row + i, column + j
            there = inside_m & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
            at = ((b * H + ih) * W + iw) * CI
            for start in range(0, CI, BK):
                k = start + tl.arange(0, BK)
                left_tile = tl.load(x + at[:, None] + k[None, :], mask=there[:, None], other=0.0)
                right_tile = tl.load(
                    w + i * w_i + j * w_j + k[:, None] * CO + n[None, :], mask=inside_n[None, :], other=0.0
                )
                acc = _dot(left_tile, right_tile, acc, PRECISION)
    else:
        for start in range(0, KH * KW * CI, BK):
            k = start + tl.arange(0, BK)
            tap, ci = k // CI, k % CI
            i, j = tap // KW, tap % KW
            ih, iw = row[:, None] + i[None, :], column[:, None] + j[None, :]
            there = inside_m[:, None] & (k < KH * KW * CI)[None, :] & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
            at = ((b[:, None] * H + ih) * W + iw) * CI + ci[None, :]
            left_tile = tl.load(x + at, mask=there, other=0.0)
            weight = i * w_i + j * w_j + ci * CO
            inside = (k < KH * KW * CI)[:, None] & inside_n[None, :]
            right_tile = tl.load(w + weight[:, None] + n[None, :], mask=inside, other=0.0)
            acc = _dot(left_tile, right_tile, acc, PRECISION)
    if bias is not None:
        acc += tl.load(bias + q * CO + n, mask=inside_n, other=0.0)[None, :]
    out = q * M * CO + m[:, None].to(tl.int64) * CO + n[None, :]
    tl.store(y + out, acc, mask=inside_m[:, None] & inside_n[None, :])


@triton.jit
def _conv_input_gradient(
    dy, w, dx,
    B, top, left, w_q, w_i, w_j,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, HS: tl.constexpr, WS: tl.constexpr,
    CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx[m, ci] = sum over taps and co of dy[m shifted back by the tap, co] w[tap, ci, co]; m = (b, ih, iw).

    Pixels are taken by their place modulo the stride: all of a program's meet the same taps, and no others are tried.
    """
    q = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    first_row, first_column = part // STRIDE, part % STRIDE
    blocks = tl.cdiv(CI, BN)
    m = tl.program_id(0) // blocks * BM + tl.arange(0, BM)
    n = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    b, place = m // (HS * WS), m % (HS * WS)
    ih, iw = place // WS * STRIDE + first_row, place % WS * STRIDE + first_column
    inside_m, inside_n = (b < B) & (ih < H) & (iw < W), n < CI
    dy += q * B * OH * OW * CO
    w += q * w_q
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range((first_row + top) % STRIDE, KH, STRIDE):
        oh = (ih + top - i) // STRIDE
        for j in range((first_column + left) % STRIDE, KW, STRIDE):
            ow = (iw + left - j) // STRIDE
            there = inside_m & (ih + top >= i) & (oh < OH) & (iw + left >= j) & (ow < OW)
            at = ((b * OH + oh) * OW + ow) * CO
            for start in range(0, CO, BK):
                k = start + tl.arange(0, BK)
                inside_k = k < CO
                left_tile = tl.load(dy + at[:, None] + k[None, :], mask=there[:, None] & inside_k[None, :], other=0.0)
                right_tile = tl.load(
                    w + i * w_i + j * w_j + n[:, None] * CO + k[None, :],
                    mask=inside_n[:, None] & inside_k[None, :],
                    other=0.0,
                )
                acc = _dot(left_tile, tl.trans(right_tile), acc, PRECISION)
    out = q * B * H * W * CI + (((b * H + ih) * W + iw) * CI)[:, None].to(tl.int64) + n[None, :]
    tl.store(dx + out, acc, mask=inside_m[:, None] & inside_n[None, :])


@triton.jit
def _conv_weight_gradient(
    x, dy, dw,
    M, top, left,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dw[tap, ci, co] = sum over m of x[m shifted by the tap, ci] dy[m, co]; dw is contiguous [Q, KH, KW, CI, CO]."""
    q = tl.program_id(1).to(tl.int64)
    K: tl.constexpr = KH * KW * CI
    blocks = tl.cdiv(CO, BN)
    k = tl.program_id(0) // blocks * BM + tl.arange(0, BM)
    n = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    inside_k, inside_n = k < K, n < CO
    tap, ci = k // CI, k % CI
    i, j = tap // KW, tap % KW
    if CI % BM == 0:  # one tap for the whole program: the loads run along ci
        ci = (tl.program_id(0) // blocks * BM) % CI + tl.arange(0, BM)
    x += q * (M // (OH * OW)) * H * W * CI
    dy += q * M * CO
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, M, BK):
        m = start + tl.arange(0, BK)
        inside_m = m < M
        b, place = m // (OH * OW), m % (OH * OW)
        row, column = place // OW * STRIDE - top, place % OW * STRIDE - left
        if CI % BM == 0:
            one = tl.program_id(0) // blocks * BM // CI
            ih, iw = row + one // KW, column + one % KW
            there = inside_m & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
            at = ((b * H + ih) * W + iw) * CI
            left_tile = tl.load(x + at[:, None] + ci[None, :], mask=there[:, None], other=0.0)
        else:
            ih, iw = row[:, None] + i[None, :], column[:, None] + j[None, :]
            there = inside_m[:, None] & inside_k[None, :] & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
            at = ((b[:, None] * H + ih) * W + iw) * CI + ci[None, :]
            left_tile = tl.load(x + at, mask=there, other=0.0)
        right_tile = tl.load(dy + m[:, None] * CO + n[None, :], mask=inside_m[:, None] & inside_n[None, :], other=0.0)
        acc = _dot(tl.trans(left_tile), right_tile, acc, PRECISION)
    out = q * K * CO + k[:, None] * CO + n[None, :]
    tl.store(dw + out, acc, mask=inside_k[:, None] & inside_n[None, :])


@triton.jit
def _norm_forward(
    x, weight, bias, mean, var, add, y, kept_mean, kept_inv,
    N, momentum, eps,
    C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
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
            z = tl.maximum(z, 0.0)
        tl.store(y + place, z, mask=inside)


@triton.jit
def _norm_backward(
    dy, x, y, weight, mean, inv, dx, d_add, dweight, dbias,
    N,
    C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
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


@dataclass(frozen=True)
class Tile:
    """How a product of [M, K] and [K, N] is cut up."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


_MULTIPROCESSORS = 132  # of an H100 or H200; what the rules below were measured on


def forward_tile(clients: int, m: int, n: int, aligned: bool) -> Tile:
    """How a forward product is cut; docs/speed.md has the measurements behind this rule and the two below."""
    if not aligned:
        return Tile(64, 64, 32, 4, 3)
    if m < 32:
        wide = clients * -(-n // 128) >= 2 * _MULTIPROCESSORS
        return Tile(16, 128, 64, 4, 3) if wide else Tile(16, 32, 64, 2, 3)
    if m >= 512:
        return Tile(64, 32, 64, 4, 3)
    return Tile(32, 64, 64, 4, 3)


def input_tile(clients: int, m: int, n: int) -> Tile:
    """How a product for the gradient of the input is cut."""
    if m < 64:
        return Tile(16, 128 if n >= 128 else 64, 64, 4, 3)
    many = clients * -(-m // 64) * -(-n // 64) >= _MULTIPROCESSORS
    return Tile(64, 64, 32, 4, 3) if many else Tile(64, 32, 64, 4, 3)


def weight_tile(m: int, aligned: bool) -> Tile:
    """How a product for the gradient of the weights is cut; m is the length of its sums."""
    if not aligned:
        return Tile(32, 64, 32, 4, 3)
    return Tile(64, 64, 32 if m >= 256 else 16, 4, 2)


def conv_forward(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: int, pad: tuple[int, int], out: tuple[int, int], precision: str
) -> Tensor:
    """x: [Q, B, H, W, CI] contiguous, w: [Q, KH, KW, CI, CO] -> [Q, B, OH, OW, CO]."""
    q, b, h, width, ci = x.shape
    kh, kw, co = w.shape[1], w.shape[2], w.shape[4]
    m = b * out[0] * out[1]
    y = x.new_empty(q, b, *out, co)
    t = forward_tile(q, m, co, ci % 64 == 0)
    grid = (-(-m // t.m) * -(-co // t.n), q)
    _conv_forward[grid](
        x, w, bias, y, m, *pad, w.stride(0), w.stride(1), w.stride(2), H=h, W=width, OH=out[0], OW=out[1],
        CI=ci, CO=co, KH=kh, KW=kw, STRIDE=stride, BM=t.m, BN=t.n, BK=t.k, PRECISION=precision,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
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
    t = input_tile(q * stride * stride, m, ci)
    grid = (-(-m // t.m) * -(-ci // t.n), q, stride * stride)
    _conv_input_gradient[grid](
        dy, w, dx, b, *pad, w.stride(0), w.stride(1), w.stride(2),
        H=size[0], W=size[1], OH=oh, OW=ow, HS=hs, WS=ws,
        CI=ci, CO=co, KH=kh, KW=kw, STRIDE=stride, BM=t.m, BN=t.n, BK=t.k, PRECISION=precision,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
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
    dw = x.new_empty(q, *taps, ci, co)
    m = b * oh * ow
    k = taps[0] * taps[1] * ci
    t = weight_tile(m, ci % 64 == 0)
    if precision == "tf32x3" and ci % 64 == 0:
        precision = "ieee"  # the sums run along the slow axis of both factors: splitting them costs more than it saves
    grid = (-(-k // t.m) * -(-co // t.n), q)
    _conv_weight_gradient[grid](
        x, dy, dw, m, *pad, H=h, W=width, OH=oh, OW=ow,
        CI=ci, CO=co, KH=taps[0], KW=taps[1], STRIDE=stride, BM=t.m, BN=t.n, BK=t.k, PRECISION=precision,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return dw


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
    y, kept_mean, kept_inv = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    rows, channels, warps = _norm_blocks(n, c, 1024)
    _norm_forward[(-(-c // channels), q)](
        x, weight, bias, mean, var, add, y, kept_mean, kept_inv, n, momentum, eps,
        C=c, BR=rows, BC=channels, RELU=relu, num_warps=warps,
    )  # fmt: skip
    return y, kept_mean, kept_inv


def norm_backward(
    dy: Tensor, x: Tensor, y: Tensor, weight: Tensor, mean: Tensor, inv: Tensor, relu: bool, add: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(dx, gradient of `add`, dweight, dbias)."""
    q, n, c = x.shape
    dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    d_add = torch.empty_like(x) if add else None
    rows, channels, warps = _norm_blocks(n, c, 256)
    _norm_backward[(-(-c // channels), q)](
        dy, x, y, weight, mean, inv, dx, d_add, dweight, dbias, n,
        C=c, BR=rows, BC=channels, RELU=relu, num_warps=warps,
    )  # fmt: skip
    return dx, d_add, dweight, dbias
