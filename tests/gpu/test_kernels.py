"""Kernels against plain torch in float64. Run with `pytest -m gpu` on a machine with a CUDA device and Triton."""

import pytest
import torch

from fedsap.models import layers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHAPES = [  # Q, B, H, CI, CO, kernel, stride, padding
    (3, 8, 32, 3, 64, 7, 2, 3),
    (3, 8, 8, 64, 64, 3, 1, 1),
    (2, 8, 8, 64, 128, 3, 2, 1),
    (20, 8, 2, 256, 256, 3, 1, 1),
    (4, 8, 2, 256, 512, 3, 2, 1),
    (60, 8, 1, 512, 512, 3, 1, 1),
    (2, 8, 2, 256, 512, 1, 2, 0),
    (3, 4, 31, 1, 10, 3, 1, 0),
    (3, 5, 29, 10, 20, 5, 1, 0),
    (1, 1, 7, 5, 7, 3, 2, 1),
    (2, 3, 9, 17, 33, 2, 1, 0),
    (2, 64, 16, 64, 64, 3, 1, 1),
    (2, 3, 32, 3, 64, 7, 1, 3),  # the stem with stem_stride = 2
]


def close(one, other, tolerance):
    assert one.shape == other.shape
    gap = (one.double() - other).norm() / other.norm()
    assert gap <= tolerance, float(gap)


def both(function, *tensors):
    """Value and gradients of a function in float32 on the kernels, and in float64 without them."""
    found = []
    for dtype in (torch.float32, torch.float64):
        own = [t.to("cuda", dtype).requires_grad_() for t in tensors]
        value = function(*own)
        torch.manual_seed(1)
        weight = torch.randn(value.shape, dtype=torch.float64, device="cuda").to(dtype)
        found.append([value.detach(), *torch.autograd.grad((value * weight).sum(), own)])
    return zip(*found, strict=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-6), ("tf32", 3e-3), ("bf16", 1e-2)])
def test_convolution(shape, precision, tolerance):
    q, b, h, ci, co, kernel, stride, padding = shape
    torch.manual_seed(0)
    x, w, bias = torch.randn(q, b, h, h, ci), torch.randn(q, kernel, kernel, ci, co), torch.randn(q, co)
    with layers.precision(precision):
        for mine, exact in both(lambda x, w, b: layers.conv2d(x, w, b, stride=stride, padding=padding), x, w, bias):
            close(mine, exact, tolerance)


def test_convolution_of_one_network_for_all_clients():
    torch.manual_seed(0)
    x, w, bias = torch.randn(4, 3, 8, 8, 16), torch.randn(3, 3, 16, 32), torch.randn(32)

    def shared(x, w, bias):
        return layers.conv2d(x, w.expand(4, *w.shape), bias.expand(4, 32), padding=1)

    for mine, exact in both(shared, x, w, bias):
        close(mine, exact, 2e-6)


@pytest.mark.parametrize("n", [8, 32, 100, 2048, 8192])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_batch_norm_with_what_follows(n, relu, residual):
    torch.manual_seed(0)
    q, c = 3, 24
    x, weight, bias, add = (
        torch.randn(q, n, 1, 1, c) * 3 + 5,
        torch.rand(q, c),
        torch.randn(q, c),
        torch.randn(q, n, 1, 1, c),
    )
    statistics = []

    def norm(x, weight, bias, add):
        mean, var = torch.zeros(q, c).to(x), torch.ones(q, c).to(x)
        statistics.append((mean, var))
        return layers.batch_norm(x, weight, bias, mean, var, train=True, add=add if residual else add * 0, relu=relu)

    for mine, exact in both(norm, x, weight, bias, add):
        if exact.norm() > 0:
            close(mine, exact, 1e-5)
    for mine, exact in zip(*statistics, strict=True):
        close(mine, exact, 1e-6)


@pytest.mark.parametrize("size", [(8, 8), (63, 59)])
def test_pooling_with_relu(size):
    torch.manual_seed(0)
    for mine, exact in both(lambda x: layers.pool_relu(x, 2), torch.randn(2, 3, *size, 10)):
        close(mine, exact, 1e-6)


def test_large_linear_layer():
    torch.manual_seed(0)
    for mine, exact in both(layers.linear, torch.randn(3, 8, 16820), torch.randn(3, 50, 16820), torch.randn(3, 50)):
        close(mine, exact, 2e-6)


def test_not_a_number_is_not_lost():
    x = torch.randn(1, 4, 4, 4, 16, device="cuda")
    x[0, 0, 0, 0, 0] = torch.nan
    assert layers.pool_relu(x, 2).isnan().any()
    one, zero = torch.ones(1, 16, device="cuda"), torch.zeros(1, 16, device="cuda")
    assert layers.batch_norm(x, one, zero, zero.clone(), one.clone(), train=True, relu=True).isnan().any()
    weight = torch.randn(1, 3, 3, 16, 16, device="cuda")
    assert layers.conv2d(x, weight, padding=1).isnan().any()


def test_the_same_twice_to_the_bit():
    torch.manual_seed(0)
    x, w = torch.randn(20, 8, 8, 8, 64, device="cuda"), torch.randn(20, 3, 3, 64, 64, device="cuda", requires_grad=True)
    y = layers.conv2d(x, w, padding=1)
    one, other = (torch.autograd.grad(y.square().sum(), w, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(one, other)
    assert torch.equal(y, layers.conv2d(x, w, padding=1))
