"""Every layer with a client axis against torch.nn, one client at a time, in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from fedsap.models import layers

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def channels_first(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def channels_last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


def assert_conv_is_torch(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> None:
    """Outputs and all gradients of conv2d, stacked, and of F.conv2d with the whole kernel, client by client."""
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    y = layers.conv2d(*leaves, stride=stride, padding=padding)
    dy = normal(*y.shape, seed=9)
    grads = torch.autograd.grad(y, leaves, dy)
    for q in range(x.shape[0]):
        own = [t[q].clone().requires_grad_() for t in (x, weight, bias) if t is not None]
        b = own[2] if bias is not None else None
        kernel = own[1].permute(3, 2, 0, 1).contiguous()
        expected = F.conv2d(channels_first(own[0]), kernel, b, stride=stride, padding=padding)
        assert_close(y[q], channels_last(expected), **EXACT)
        for got, want in zip(grads, torch.autograd.grad(channels_last(expected), own, dy[q]), strict=True):
            assert_close(got[q], want, **EXACT)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_convolution_of_any_shape_is_torchs(data: st.DataObject) -> None:
    kh, kw = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    padding = data.draw(st.integers(0, min(kh, kw) - 1))
    height = data.draw(st.integers(max(1, kh - 2 * padding), 9))
    width = data.draw(st.integers(max(1, kw - 2 * padding), 9))
    q, b, inputs, outputs = (data.draw(st.integers(1, 3)) for _ in range(4))
    bias = normal(q, outputs, seed=2) if data.draw(st.booleans()) else None
    x, weight = normal(q, b, height, width, inputs), normal(q, kh, kw, inputs, outputs, seed=1)
    assert_conv_is_torch(x, weight, bias, stride=data.draw(st.integers(1, 3)), padding=padding)


@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (1, 2), (2, 1)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_large_maps_on_a_cpu_are_torchs_too(stride: int, padding: int, with_bias: bool) -> None:
    x, weight = normal(3, 4, 33, 31, 8), normal(3, 5, 5, 8, 6, seed=1)
    bias = normal(3, 6, seed=2) if with_bias else None
    exact = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    single = [t.detach().float().requires_grad_() for t in exact]
    found = []
    for leaves in (exact, single):  # float64 goes by patches, float32 client by client
        y = layers.conv2d(*leaves, stride=stride, padding=padding)
        found.append((y, *torch.autograd.grad(y, leaves, normal(*y.shape, seed=9).to(y))))
    assert layers._suits_onednn(single[0], single[1], (y.shape[2], y.shape[3]))
    for want, got in zip(*found, strict=True):
        assert (got - want).norm() < 5e-6 * want.norm()


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_dead_taps_change_nothing(kernel: int, size: int, stride: int) -> None:
    x, weight = normal(3, 2, size, size, 4), normal(3, kernel, kernel, 4, 5, seed=1)
    assert_conv_is_torch(x, weight, None, stride=stride, padding=kernel // 2)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "live"),
    [
        (1, 3, 1, 1, slice(1, 2)),
        (1, 3, 2, 1, slice(1, 2)),
        (2, 3, 1, 1, slice(0, 3)),
        (2, 3, 2, 1, slice(1, 3)),
        (1, 7, 2, 3, slice(3, 4)),
        (1, 1, 1, 0, slice(0, 1)),
        (1, 3, 2, 2, slice(0, 3)),
    ],
)
def test_live_taps_by_hand(size: int, kernel: int, stride: int, padding: int, live: slice) -> None:
    assert layers.live_taps(size, kernel, stride, padding) == live


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 3), st.data())
def test_dead_taps_have_no_gradient_in_torch_and_live_ends_have(
    size: int, kernel: int, stride: int, data: st.DataObject
) -> None:
    padding = data.draw(st.integers(0, kernel - 1))
    if size + 2 * padding < kernel:
        return
    weight = torch.zeros(1, 1, kernel, requires_grad=True)
    F.conv1d(torch.ones(1, 1, size), weight, stride=stride, padding=padding).sum().backward()
    assert weight.grad is not None
    met = weight.grad.flatten().nonzero().flatten().tolist()
    assert layers.live_taps(size, kernel, stride, padding) == slice(met[0], met[-1] + 1)


def test_convolution_takes_the_live_taps_alone() -> None:
    x, weight = normal(2, 3, 2, 2, 4), normal(2, 3, 3, 4, 5, seed=1)
    whole = layers.conv2d(x, weight, stride=2, padding=1, kernel=3)
    assert_close(layers.conv2d(x, weight[:, 1:, 1:], stride=2, padding=1, kernel=3), whole, **EXACT)


def test_convolution_refuses_a_kernel_of_another_size() -> None:
    with pytest.raises(ValueError, match="the kernel has 2 taps on axis 1; 3 or 3 were expected"):
        layers.conv2d(normal(1, 1, 8, 8, 1), normal(1, 2, 2, 1, 1), padding=1, kernel=3)


def test_convolution_refuses_an_image_smaller_than_the_kernel() -> None:
    with pytest.raises(ValueError, match="an input of 2 is too small for a kernel of 5 with padding 0"):
        layers.conv2d(normal(1, 1, 2, 2, 1), normal(1, 5, 5, 1, 1))


@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (1, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize("limit", [1, 7_000])
def test_convolution_in_pieces_is_the_same(
    monkeypatch: pytest.MonkeyPatch, limit: int, stride: int, padding: int
) -> None:
    monkeypatch.setattr(layers, "_PATCH_BYTES", {"cpu": limit})
    x, weight, bias = normal(3, 2, 9, 7, 2), normal(3, 3, 3, 2, 4, seed=1), normal(3, 4, seed=2)
    assert_conv_is_torch(x, weight, bias, stride=stride, padding=padding)


def test_convolution_leaves_out_gradients_nobody_wants() -> None:
    x, weight = normal(2, 2, 5, 5, 3), normal(2, 3, 3, 3, 4, seed=1).requires_grad_()
    y = layers.conv2d(x, weight, normal(2, 4), padding=1)
    (grad,) = torch.autograd.grad(y.sum(), [weight])
    frozen = weight.detach()
    x.requires_grad_()
    (dx,) = torch.autograd.grad(layers.conv2d(x, frozen, padding=1).sum(), [x])
    assert (grad.shape, dx.shape) == (weight.shape, x.shape)


def test_linear_is_torchs() -> None:
    x, weight, bias = normal(3, 4, 6), normal(3, 5, 6, seed=1), normal(3, 5, seed=2)
    y = layers.linear(x, weight, bias)
    for q in range(3):
        assert_close(y[q], F.linear(x[q], weight[q], bias[q]), **EXACT)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, None, 0), (3, 2, 1)])
def test_max_pool_is_torchs(kernel: int, stride: int | None, padding: int) -> None:
    x = normal(3, 2, 7, 9, 4)
    y = layers.max_pool(x, kernel, stride, padding)
    for q in range(3):
        assert_close(y[q], channels_last(F.max_pool2d(channels_first(x[q]), kernel, stride, padding)), **EXACT)


def test_flatten_is_in_torchs_order() -> None:
    x = normal(3, 2, 4, 5, 6)
    assert_close(layers.flatten(x)[1], channels_first(x[1]).flatten(1), **EXACT)


def test_dropout_scales_what_it_keeps() -> None:
    x, noise = normal(4, 5), torch.rand(4, 5, generator=torch.Generator().manual_seed(0))
    y = layers.dropout(x, noise, 0.25)
    assert_close(y, torch.where(noise >= 0.25, x / 0.75, 0), **EXACT)


def test_batch_norm_is_torchs_over_several_batches() -> None:
    q, c = 3, 4
    plain = [nn.BatchNorm2d(c).double() for _ in range(q)]
    weight, bias = 1 + 0.1 * normal(q, c), normal(q, c, seed=1)
    stack = torch.zeros(5, c, dtype=torch.float64), torch.ones(5, c, dtype=torch.float64)
    running = [t[:q] for t in stack]  # views of a larger stack
    for step in range(3):
        x, dy = 3 + 2 * normal(q, 4, 3, 5, c, seed=step), normal(q, 4, 3, 5, c, seed=10 + step)
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        y = layers.batch_norm(*leaves, *running, train=True)
        grads = torch.autograd.grad(y, leaves, dy)
        for i, module in enumerate(plain):
            own = [t[i].clone().requires_grad_() for t in (x, weight, bias)]
            expected = torch.func.functional_call(module, {"weight": own[1], "bias": own[2]}, (channels_first(own[0]),))
            assert_close(y[i], channels_last(expected), **EXACT)
            for got, want in zip(grads, torch.autograd.grad(channels_last(expected), own, dy[i]), strict=True):
                assert_close(got[i], want, **EXACT)
            assert_close(stack[0][i], module.running_mean, **EXACT)
            assert_close(stack[1][i], module.running_var, **EXACT)
    assert bool((stack[0][q:] == 0).all() and (stack[1][q:] == 1).all())


def test_batch_norm_in_evaluation_uses_the_running_statistics() -> None:
    x, weight, bias, mean = normal(2, 3, 4, 4, 5), normal(2, 5, seed=1), normal(2, 5, seed=2), normal(2, 5, seed=3)
    var = normal(2, 5, seed=4).square()
    kept = mean.clone(), var.clone()
    y = layers.batch_norm(x, weight, bias, mean, var, train=False)
    for q in range(2):
        expected = F.batch_norm(channels_first(x[q]), mean[q], var[q], weight[q], bias[q])
        assert_close(y[q], channels_last(expected), **EXACT)
    assert_close((mean, var), kept, rtol=0, atol=0)


def test_batch_norm_of_a_single_value_is_finite() -> None:
    mean, var = torch.zeros(2, 3), torch.ones(2, 3)
    x = torch.full((2, 1, 1, 1, 3), 5.0, requires_grad=True)
    y = layers.batch_norm(x, torch.ones(2, 3), torch.full((2, 3), 0.5), mean, var, train=True)
    (dx,) = torch.autograd.grad(y.sum(), [x])
    assert_close(y, torch.full_like(y, 0.5))
    assert_close(dx, torch.zeros_like(x))
    assert_close(var, torch.full((2, 3), 0.9))
