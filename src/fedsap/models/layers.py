"""Layers whose weights and activations carry a leading client axis Q.

Activations are channels-last, [Q, B, H, W, C]: client q sees only its own batch and its own weights, and no layer loops
over clients. Convolution weights are [Q, kh, kw, Cin, Cout], so that the taps of a kernel are slices and the product
with the patches needs no transpose. Linear weights are [Q, out, in], as in torch.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Precision = Literal["fp32", "tf32", "bf16"]
_PRECISION: Precision = "fp32"
# What the tensor cores are told. "tf32x3" splits each factor in two: as exact as float32 arithmetic, and faster.
_DOT = {"fp32": "tf32x3", "tf32": "tf32", "bf16": "bf16"}
_TRITON = importlib.util.find_spec("triton") is not None


@contextmanager
def precision(kind: Precision) -> Iterator[None]:
    """How exactly float32 products are computed on a GPU: as float32, or with factors rounded to tf32 or bf16.

    Weights, activations, statistics and sums are float32 in any case. Elsewhere than on a GPU it changes nothing.

    >>> with precision("tf32"):
    ...     linear(torch.ones(1, 1, 2), torch.ones(1, 1, 2), torch.zeros(1, 1)).item()
    2.0
    """
    global _PRECISION
    before, matmul = _PRECISION, torch.backends.cuda.matmul.allow_tf32
    _PRECISION, torch.backends.cuda.matmul.allow_tf32 = kind, kind != "fp32"
    try:
        yield
    finally:
        _PRECISION, torch.backends.cuda.matmul.allow_tf32 = before, matmul


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Are there kernels for this device and type, beside plain torch?"""
    return _TRITON and device.type == "cuda" and dtype == torch.float32


def compile_all(work: Callable[[], object]) -> None:
    """Compiles at once the kernels that `work` would launch; nothing is launched, and what `work` computes is void."""
    from fedsap.models import kernels

    kernels.compile_all(work)


def descend(w: Tensor, g: Tensor, m: Tensor, lr: float, momentum: float, decay: float) -> None:
    """m <- momentum m + g + decay w;  w <- w - lr m, in place and in one pass; only where `has_kernels`."""
    from fedsap.models import kernels

    kernels.descend(w, g, m, lr, momentum, decay)


def _on_kernels(x: Tensor) -> bool:
    return has_kernels(x.device, x.dtype)


# Patches beyond this are built a few output rows at a time: on a CPU they then stay near the cache and are not paid
# for with fresh pages of memory, on a GPU they do not fill it.
_PATCH_BYTES = {"cpu": 2**24, "cuda": 2**30}


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """y_q = x_q W_q^T + b_q.

    x: [Q, B, in]. weight: [Q, out, in]. bias: [Q, out]. Returns [Q, B, out].

    >>> x, weight, bias = torch.ones(2, 1, 3), torch.ones(2, 4, 3), torch.zeros(2, 4)
    >>> linear(x, weight, bias).shape
    torch.Size([2, 1, 4])
    """
    if _on_kernels(x) and weight[0].numel() >= _LARGE_LINEAR:
        y: Tensor = _Linear.apply(x, weight, bias, _DOT[_PRECISION])  # type: ignore[no-untyped-call]
        return y
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


# From this size on, the gradient of the weights is worth a kernel: a batched product of this shape comes out slow.
_LARGE_LINEAR = 2**18


class _Linear(torch.autograd.Function):
    """`linear` with the gradient of its weights computed as that of a 1x1 convolution from dy to x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dot: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dot = dot
        return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from fedsap.models import kernels

        x, weight = ctx.saved_tensors
        dx = torch.bmm(dy, weight) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            one, other = (v.contiguous()[:, :, None, None] for v in (dy, x))
            dw = kernels.conv_weight_gradient(one, other, (1, 1), 1, (0, 0), ctx.dot).view(weight.shape)
        return dx, dw, dy.sum(1) if ctx.needs_input_grad[2] else None, None


def live_taps(size: int, kernel: int, stride: int, padding: int) -> slice:
    """The taps of a padded kernel, along one axis, that meet real input at least once.

    Tap i meets input o * stride + i - padding at output o; a tap for which that always falls into the padding is dead:
    it adds nothing to the output and its gradient is zero. The slice runs from the first to the last live tap.

    >>> live_taps(1, kernel=3, stride=1, padding=1)
    slice(1, 2, None)
    >>> live_taps(2, kernel=3, stride=2, padding=1)
    slice(1, 3, None)
    >>> live_taps(8, kernel=3, stride=1, padding=1)
    slice(0, 3, None)
    """
    if padding >= kernel:
        raise ValueError(f"padding {padding} must be smaller than the kernel, {kernel}")
    outputs = output_size(size, kernel, stride, padding)
    if outputs < 1:
        raise ValueError(f"an input of {size} is too small for a kernel of {kernel} with padding {padding}")
    live = [i for i in range(kernel) if any(0 <= o * stride + i - padding < size for o in range(outputs))]
    return slice(live[0], live[-1] + 1)


def output_size(size: int, kernel: int, stride: int, padding: int) -> int:
    """How many positions a kernel takes along an axis: floor((size + 2 padding - kernel) / stride) + 1.

    >>> output_size(32, kernel=7, stride=2, padding=3)
    16
    """
    return (size + 2 * padding - kernel) // stride + 1


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    kernel: int | None = None,
) -> Tensor:
    """y_q[b, u, v] = b_q + sum_ij x_q[b, u s + i - p, v s + j - p] W_q[i, j], zero outside the image.

    The patches of all clients are multiplied by their weights in one batched product; dead taps (`live_taps`) are left
    out of it. `kernel`, when given, is the size of the whole square kernel; `weight` may then hold its live taps only.

    x: [Q, B, H, W, Cin]. weight: [Q, kh, kw, Cin, Cout]. bias: [Q, Cout]. Returns [Q, B, H', W', Cout].

    >>> x, weight = torch.ones(2, 1, 5, 5, 3), torch.ones(2, 3, 3, 3, 4)
    >>> conv2d(x, weight, stride=2, padding=1).shape
    torch.Size([2, 1, 3, 3, 4])
    """
    if torch.compiler.is_compiling() and len(x) == 1:
        return _one(x, weight, bias, stride, padding)
    kh, kw = (kernel, kernel) if kernel is not None else (weight.shape[1], weight.shape[2])
    height, width = x.shape[2], x.shape[3]
    rows, columns = live_taps(height, kh, stride, padding), live_taps(width, kw, stride, padding)
    weight = _narrow(_narrow(weight, 1, rows, kh), 2, columns, kw)
    top, left = padding - rows.start, padding - columns.start
    out_h, out_w = output_size(height, kh, stride, padding), output_size(width, kw, stride, padding)
    bottom = max(0, (out_h - 1) * stride + weight.shape[1] - height - top)
    right = max(0, (out_w - 1) * stride + weight.shape[2] - width - left)
    pad, out = (top, bottom, left, right), (out_h, out_w)
    if _on_kernels(x):
        fused: Tensor = _Direct.apply(x, weight, bias, stride, (top, left), out, _DOT[_PRECISION])  # type: ignore[no-untyped-call]
        return fused
    if (top, left) == (padding, padding) and _suits_onednn(x, weight, out):
        whole: Tensor = _OneByOne.apply(x, weight, bias, stride, padding, out)  # type: ignore[no-untyped-call]
        return whole
    y: Tensor = _Convolution.apply(x, weight, bias, stride, pad, out)  # type: ignore[no-untyped-call]
    return y


def _one(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """`conv2d` of a single client by torch's own operator, for a graph that is traced and run elsewhere."""
    image, kernel = x.squeeze(0).permute(0, 3, 1, 2), weight.squeeze(0).permute(3, 2, 0, 1)
    y = F.conv2d(image, kernel, None if bias is None else bias.squeeze(0), stride, padding)
    return y.permute(0, 2, 3, 1).unsqueeze(0)


def _suits_onednn(x: Tensor, weight: Tensor, out: tuple[int, int]) -> bool:
    """Is a convolution on a CPU faster client by client in oneDNN than as patches of all clients? On large maps with
    small kernels, patches leave the cache; the bounds are read off docs/speed.md's table."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    _, kh, kw, inputs, outputs = weight.shape
    taps = kh * kw * inputs
    patches = 4 * x.shape[1] * out[0] * out[1] * taps
    return kh * kw > 1 and out[0] * out[1] >= 64 and taps * outputs <= 2**18 and patches >= 2**19


def _narrow(weight: Tensor, axis: int, live: slice, kernel: int) -> Tensor:
    taps: int = live.stop - live.start
    if weight.shape[axis] == taps:
        return weight
    if weight.shape[axis] != kernel:
        raise ValueError(f"the kernel has {weight.shape[axis]} taps on axis {axis}; {taps} or {kernel} were expected")
    return weight.narrow(axis, live.start, taps)


class _Convolution(torch.autograd.Function):
    """Patches and one batched product, with the backward pass written out.

    With patches P [Q, N, K], K = kh kw Cin and N = B H' W': Y = P W + b, dW = P^T dY, dP = dY W^T, and dX is dP added
    back to where it was taken. Large P is never held: it is built for a few output rows at a time, in both directions.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: int,
        pad: tuple[int, int, int, int],
        out: tuple[int, int],
    ) -> Tensor:
        q, kh, kw, _, channels = weight.shape
        top, bottom, left, right = pad
        padded = F.pad(x, (0, 0, left, right, top, bottom)) if any(pad) else x
        view = _patch_view(padded, kh, kw, (stride, stride), out)
        step = _rows_at_once(view)
        flat = weight.reshape(q, -1, channels)
        if step >= out[0]:
            patches = _patches(view)
            y = _product(patches, flat, bias).view(q, -1, *out, channels)
            ctx.save_for_backward(patches, weight)
        else:
            y = x.new_empty(q, x.shape[1], *out, channels)
            for row in range(0, out[0], step):
                patches = _patches(view[:, :, row : row + step])
                part = y[:, :, row : row + step]
                part.copy_(_product(patches, flat, bias).view(part.shape))
            ctx.save_for_backward(padded, weight)
        ctx.padded, ctx.step, ctx.stride, ctx.pad, ctx.out = padded.shape, step, stride, pad, out
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, weight = ctx.saved_tensors
        q, kh, kw, inputs, channels = weight.shape
        flat = weight.reshape(q, -1, channels).transpose(1, 2)
        out_h, out_w = ctx.out
        whole = ctx.step >= out_h
        view = saved if whole else _patch_view(saved, kh, kw, (ctx.stride, ctx.stride), ctx.out)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx: Tensor | None = None
        dw: Tensor | None = None
        for row in range(0, out_h, ctx.step):
            rows = min(ctx.step, out_h - row)
            part = dy[:, :, row : row + rows].reshape(q, -1, channels)
            if needs_weight:
                patches = view if whole else _patches(view[:, :, row : row + rows])
                product = patches.transpose(1, 2)
                dw = torch.bmm(product, part) if dw is None else dw.baddbmm_(product, part)
            if needs_x:
                taps = torch.bmm(part, flat).view(q, -1, rows, out_w, kh, kw, inputs)
                if kh == kw == ctx.stride == 1 and whole:
                    dx = taps.view(q, -1, rows, out_w, inputs)
                else:
                    dx = dy.new_zeros(ctx.padded) if dx is None else dx
                    _fold(dx, taps, row * ctx.stride, ctx.stride)
        if dx is not None:
            top, _, left, _ = ctx.pad
            size = ctx.padded[2] - sum(ctx.pad[:2]), ctx.padded[3] - sum(ctx.pad[2:])
            dx = dx[:, :, top : top + size[0], left : left + size[1]]
        db = dy.sum((1, 2, 3)) if ctx.has_bias and needs_bias else None
        return dx, None if dw is None else dw.view(weight.shape), db, None, None, None


class _OneByOne(torch.autograd.Function):
    """The same by the device's own convolution, one client after another, with channels last as they are."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: int,
        padding: int,
        out: tuple[int, int],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding, ctx.has_bias = stride, padding, bias is not None
        y = x.new_empty(*x.shape[:2], *out, weight.shape[-1])
        for q in range(len(x)):
            own = None if bias is None else bias[q]
            image, kernel = x[q].permute(0, 3, 1, 2), weight[q].permute(3, 2, 0, 1)
            y[q] = F.conv2d(image, kernel, own, stride, padding).permute(0, 2, 3, 1)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted = [*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2]]
        dx, dw = (torch.empty_like(v) if need else None for v, need in zip((x, weight), wanted[:2], strict=True))
        db = dy.new_empty(len(x), weight.shape[-1]) if wanted[2] else None
        for q in range(len(x)):
            to_x, to_w, to_b = torch.ops.aten.convolution_backward(
                dy[q].permute(0, 3, 1, 2),
                x[q].permute(0, 3, 1, 2),
                weight[q].permute(3, 2, 0, 1),
                [weight.shape[-1]],
                [ctx.stride] * 2,
                [ctx.padding] * 2,
                [1, 1],
                False,
                [0, 0],
                1,
                wanted,
            )
            if dx is not None:
                dx[q] = to_x.permute(0, 2, 3, 1)
            if dw is not None:
                dw[q] = to_w.permute(2, 3, 1, 0)
            if db is not None:
                db[q] = to_b
        return dx, dw, db, None, None, None


class _Direct(torch.autograd.Function):
    """The same in kernels that read the image where a patch would have been copied from it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: int,
        pad: tuple[int, int],
        out: tuple[int, int],
        dot: str,
    ) -> Tensor:
        from fedsap.models import kernels

        x = x.contiguous()
        if weight.stride()[3:] != (weight.shape[4], 1):
            weight = weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.pad, ctx.dot = stride, pad, dot
        return kernels.conv_forward(x, weight, bias, stride, pad, out, dot)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from fedsap.models import kernels

        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = kernels.conv_input_gradient(dy, weight, x.shape[2:4], ctx.stride, ctx.pad, ctx.dot)
        if ctx.needs_input_grad[1]:
            dw = kernels.conv_weight_gradient(x, dy, weight.shape[1:3], ctx.stride, ctx.pad, ctx.dot)
        db = dy.sum((1, 2, 3)) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None, None, None


def _patch_view(x: Tensor, kh: int, kw: int, stride: tuple[int, int], out: tuple[int, int]) -> Tensor:
    """x: [Q, B, H, W, C] -> [Q, B, H', W', kh, kw, C], without a copy."""
    windows = x.unfold(2, kh, stride[0])[:, :, : out[0]].unfold(3, kw, stride[1])[:, :, :, : out[1]]
    return windows.permute(0, 1, 2, 3, 5, 6, 4)


def _patches(view: Tensor) -> Tensor:
    """view: [Q, B, H', W', kh, kw, C] -> [Q, B * H' * W', kh * kw * C]."""
    q, kw, channels = view.shape[0], view.shape[5], view.shape[6]
    taps = view.shape[4] * kw * channels
    if kw * channels < 16:  # copied tap by tap: pixel by pixel the runs would be too short
        return view.permute(0, 4, 5, 6, 1, 2, 3).reshape(q, taps, -1).transpose(1, 2)
    return view.reshape(q, -1, taps)


def _rows_at_once(view: Tensor) -> int:
    row = view.numel() // view.shape[2] * view.element_size()
    return min(view.shape[2], max(1, _PATCH_BYTES.get(view.device.type, 2**30) // max(1, row)))


def _product(patches: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.bmm(patches, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), patches, weight)


def _fold(dx: Tensor, taps: Tensor, row: int, stride: int) -> None:
    """Adds the gradients of patches [Q, B, H', W', kh, kw, C] to the pixels they were taken from, from `row` on.

    Every n-th patch, n = ceil(kernel / stride), overlaps with no other of them: those are added at once, in long runs.
    """
    rows, columns, kh, kw = taps.shape[2:6]
    down, across = -(-kh // stride), -(-kw // stride)
    for i in range(min(down, rows)):
        for j in range(min(across, columns)):
            part = taps[:, :, i::down, j::across]
            pixels = dx[:, :, row + i * stride :, j * stride :]
            size = part.shape[2], part.shape[3]
            windows = _patch_view(pixels, kh, kw, (down * stride, across * stride), size)
            windows += part


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    *,
    train: bool,
    add: Tensor | None = None,
    relu: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """y = (x - mean) / sqrt(var + eps) * weight + bias, each client with its own statistics.

    What follows in a residual network may be done along: `add` is added to y, then `relu` cuts it off at zero.

    With `train`, mean and (biased) var are those of the client's batch, over (B, H, W), and the running statistics move
    towards them in place: r <- (1 - momentum) r + momentum * s, with the unbiased variance n / (n - 1) var; where a
    channel has a single value (n = 1) it is zero. Otherwise the running statistics are used.

    x: [Q, B, H, W, C]. weight, bias, running_mean, running_var: [Q, C]. Returns the shape of x.

    >>> x, one, zero = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1, 1), torch.ones(1, 1), torch.zeros(1, 1)
    >>> mean, var = torch.zeros(1, 1), torch.ones(1, 1)
    >>> batch_norm(x, one, zero, mean, var, train=True).flatten()
    tensor([-1.0000,  1.0000])
    >>> mean, var
    (tensor([[0.2000]]), tensor([[1.1000]]))
    """
    flat = x.reshape(x.shape[0], -1, x.shape[-1])
    if not train:
        scale = weight * (running_var + eps).rsqrt()
        y = torch.addcmul((bias - running_mean * scale).unsqueeze(1), flat, scale.unsqueeze(1)).view(x.shape)
        return _after(y, add, relu)
    if len(x) > 1 and running_mean.stride(0) == 0:  # one network for all clients: no client moves its statistics
        running_mean, running_var = running_mean.contiguous(), running_var.contiguous()
    if _on_kernels(x):
        fused: Tensor = _NormAddRelu.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, running_mean, running_var, add, relu, momentum, eps
        )
        return fused
    n = flat.shape[1]
    with torch.no_grad():
        mean = flat.mean(1)
        var = (flat - mean.unsqueeze(1)).square_().mean(1)  # torch.var_mean is many times slower over this axis
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var * (n / max(1, n - 1)), momentum)
    inv = (var + eps).rsqrt()
    y = _BatchNorm.apply(flat, weight, bias, mean, inv).view(x.shape)  # type: ignore[no-untyped-call]
    return _after(y, add, relu)


def _after(y: Tensor, add: Tensor | None, relu: bool) -> Tensor:
    y = y if add is None else y + add
    return F.relu(y) if relu else y


class _NormAddRelu(torch.autograd.Function):
    """`batch_norm` in training as one kernel each way."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        var: Tensor,
        add: Tensor | None,
        relu: bool,
        momentum: float,
        eps: float,
    ) -> Tensor:
        from fedsap.models import kernels

        x = x.contiguous()
        flat = x.view(x.shape[0], -1, x.shape[-1])
        added = None if add is None else add.contiguous().view(flat.shape)
        y, kept_mean, inv = kernels.norm_forward(flat, weight, bias, mean, var, added, relu, momentum, eps)
        ctx.save_for_backward(flat, y, weight, kept_mean, inv)
        ctx.relu, ctx.add = relu, add is not None
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from fedsap.models import kernels

        x, y, weight, mean, inv = ctx.saved_tensors
        dx, d_add, dw, db = kernels.norm_backward(
            dy.contiguous().view(x.shape), x, y, weight, mean, inv, ctx.relu, ctx.add
        )
        d_add = None if d_add is None else d_add.view(dy.shape)
        return dx.view(dy.shape), dw, db, None, None, d_add, None, None, None


class _BatchNorm(torch.autograd.Function):
    """Normalisation by given batch statistics, with the gradient through them written out.

    With z = (x - mean) * inv and a = weight * inv: db = sum dy, dw = sum dy z, dx = a (dy - (db + z dw) / n).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inv: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, mean, inv)
        scale = weight * inv
        return torch.addcmul((bias - mean * scale).unsqueeze(1), x, scale.unsqueeze(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inv = ctx.saved_tensors
        n = x.shape[1]
        centred = x - mean.unsqueeze(1)
        db = dy.sum(1)
        dw = (dy * centred).sum(1) * inv
        dx: Tensor | None = None
        if ctx.needs_input_grad[0]:
            scale = weight * inv
            dx = centred.mul_((-scale * inv * dw / n).unsqueeze(1)).addcmul_(dy, scale.unsqueeze(1))
            dx.sub_((scale * db / n).unsqueeze(1))
        return dx, dw, db, None, None


def pool_relu(x: Tensor, size: int) -> Tensor:
    """ReLU of the largest value of each window of size x size, windows side by side.

    x: [Q, B, H, W, C]. Returns [Q, B, H // size, W // size, C].

    >>> pool_relu(torch.tensor([-1.0, -2.0, 3.0, 4.0]).view(1, 1, 2, 2, 1), 2).flatten()
    tensor([4.])
    """
    if _on_kernels(x):
        y: Tensor = _PoolRelu.apply(x, size)  # type: ignore[no-untyped-call]
        return y
    return F.relu(max_pool(x, size))


class _PoolRelu(torch.autograd.Function):
    """`pool_relu` as one kernel each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        from fedsap.models import kernels

        x = x.contiguous()
        y = kernels.pool_forward(x.flatten(0, 1), size)
        y = y.view(*x.shape[:2], *y.shape[1:])
        ctx.save_for_backward(x, y)
        ctx.size = size
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from fedsap.models import kernels

        x, y = ctx.saved_tensors
        dx = kernels.pool_backward(dy.contiguous().flatten(0, 1), x.flatten(0, 1), y.flatten(0, 1), ctx.size)
        return dx.view(x.shape), None


def max_pool(x: Tensor, kernel: int, stride: int | None = None, padding: int = 0) -> Tensor:
    """The largest value of each window, over the clients' images as one batch.

    x: [Q, B, H, W, C]. Returns [Q, B, H', W', C].

    >>> max_pool(torch.arange(16.0).view(1, 1, 4, 4, 1), 2).flatten()
    tensor([ 5.,  7., 13., 15.])
    """
    pooled = F.max_pool2d(x.flatten(0, 1).permute(0, 3, 1, 2), kernel, stride, padding)
    return pooled.permute(0, 2, 3, 1).reshape(*x.shape[:2], *pooled.shape[2:], x.shape[-1])


def flatten(x: Tensor) -> Tensor:
    """Flattens maps with the channel first, the order of torch's own layers.

    x: [Q, B, H, W, C]. Returns [Q, B, C * H * W].

    >>> flatten(torch.tensor([[1, 2], [3, 4]]).view(1, 1, 2, 1, 2)).tolist()
    [[[1, 3, 2, 4]]]
    """
    return x.permute(0, 1, 4, 2, 3).flatten(2)


def dropout(x: Tensor, noise: Tensor, p: float) -> Tensor:
    """x / (1 - p) where noise >= p, else 0. `noise`, uniform in [0, 1), broadcasts against x.

    >>> dropout(torch.ones(3), torch.tensor([0.1, 0.5, 0.9]), 0.5)
    tensor([0., 2., 2.])
    """
    return x * ((noise >= p).to(x.dtype) / (1 - p))


def project(e: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """y_q = e_q W_q^T + b_q with the layer `project`, where the network has one; else e.

    e: [Q, B, width]. Returns [Q, B, d].

    >>> project(torch.ones(1, 1, 2), {"project.weight": torch.ones(1, 3, 2), "project.bias": torch.zeros(1, 3)})
    tensor([[[2., 2., 2.]]])
    """
    if "project.weight" not in weights:
        return e
    return linear(e, weights["project.weight"], weights["project.bias"])


def head_input(h: Tensor, kind: str) -> Tensor:
    """What the output layer reads: h itself ("raw") or h / ||h|| ("normalized", "cosine").

    h: [Q, B, d]. Returns [Q, B, d].

    >>> head_input(torch.tensor([[[3.0, 4.0]]]), "normalized")
    tensor([[[0.6000, 0.8000]]])
    """
    return h if kind == "raw" else F.normalize(h, dim=-1)


def output(read: Tensor, weight: Tensor, bias: Tensor, kind: str, scale: float) -> Tensor:
    """The output layer, over what `head_input` gave it.

        raw, normalized   z_c = w_c . u + b_c
        cosine            z_c = scale * (w_c / ||w_c||) . u        (no bias: scale times the cosine of h and w_c)

    read u: [Q, B, d]. weight: [Q, C, d]. bias: [Q, C]. Returns [Q, B, C].

    >>> read, weight = torch.tensor([[[0.6, 0.8]]]), torch.tensor([[[0.0, 5.0]]])
    >>> output(read, weight, torch.ones(1, 1), "cosine", scale=10.0)
    tensor([[[8.]]])
    """
    if kind == "cosine":
        return scale * torch.bmm(read, F.normalize(weight, dim=-1).transpose(1, 2))
    return linear(read, weight, bias)


def embedding(e: Tensor, kind: str) -> Tensor:
    """The embedding h of what the network computed: e itself ("relu", "linear") or e / ||e|| ("unit").

    e: [Q, B, d]. Returns [Q, B, d].

    >>> embedding(torch.tensor([[[3.0, 4.0]]]), "unit")
    tensor([[[0.6000, 0.8000]]])
    """
    return F.normalize(e, dim=-1) if kind == "unit" else e
