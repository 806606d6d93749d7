"""A user's nn.Module, stacked, against the same module one client at a time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.testing import assert_close

from fedsap.errors import UserError
from fedsap.models import from_module, stack

EXACT = {"rtol": 1e-9, "atol": 1e-9}
SHAPE = (9, 7, 2)


class Masked(nn.Module):
    """Dropout with masks that are set from outside, in the order of the calls."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.noise: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        noise = self.noise.pop(0)
        return x * (noise.reshape(*noise.shape, *(1,) * (x.dim() - noise.dim())) >= self.p) / (1 - self.p)


class Net(nn.Module):
    """BatchNorm, dropout of channels and elements, one dropout used twice, a constant, an early map."""

    def __init__(self, channels: Callable[[float], nn.Module], single: Callable[[float], nn.Module]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, padding=1)
        self.bn = nn.BatchNorm2d(6)
        self.features = nn.Sequential(nn.ReLU(), channels(0.4), nn.MaxPool2d(2))
        self.fc1 = nn.Linear(6 * 4 * 3, 8)
        self.bn1 = nn.BatchNorm1d(8)
        self.drop = single(0.5)
        self.fc = nn.Linear(8, 5)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("order", torch.arange(8).flip(0))
        self.register_buffer("shift", torch.full((8,), 0.25), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low = self.features(self.bn(self.conv(x)))
        h = self.drop(F.relu(self.bn1(self.fc1(low.view(len(x), -1)))))
        h = self.drop(h[:, self.order] * self.scale + self.shift)
        return h, self.fc(h), low


def make() -> nn.Module:
    return Net(nn.Dropout2d, nn.Dropout)


def test_three_steps_equal_one_client_at_a_time() -> None:
    network = from_module(make, shape=SHAPE)
    assert network.noise == {"features.1.u0": (6,), "drop.u0": (8,), "drop.u1": (8,)}
    assert {"bn.running_mean", "bn.running_var", "scale"} <= network.buffers
    assert (network.dim, network.low_dim, network.classes) == (8, 72, 5)
    whole = {k: v.double() for k, v in stack([network.init(Generator().manual_seed(q)) for q in range(4)]).items()}
    weights = {name: tensor[:3] for name, tensor in whole.items()}
    models = []
    for q in range(3):
        model = Net(Masked, Masked).double().train()
        model.load_state_dict(network.export({name: tensor[q] for name, tensor in whole.items()}), strict=True)
        models.append(model)
    optimisers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    draw = Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(3, 4, *SHAPE, generator=draw, dtype=torch.float64)
        noise = {name: torch.rand(3, 4, *size, generator=draw) for name, size in network.noise.items()}
        leaves = {k: v.detach().requires_grad_() for k, v in weights.items() if k not in network.buffers}
        out = network({**weights, **leaves}, x, train=True, noise=noise)
        loss = out.h.square().sum() + out.logits.square().sum() + out.low.square().sum()
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        for q, (model, optimiser) in enumerate(zip(models, optimisers, strict=True)):
            model.features[1].noise = [noise["features.1.u0"][q]]
            model.drop.noise = [noise["drop.u0"][q], noise["drop.u1"][q]]
            h, logits, low = model(x[q].permute(0, 3, 1, 2).contiguous())
            assert_close((out.h[q], out.logits[q], out.low[q]), (h, logits, low.flatten(1)), **EXACT)
            optimiser.zero_grad()
            (h.square().sum() + logits.square().sum() + low.square().sum()).backward()
            for name, parameter in model.named_parameters():
                assert_close(grads[name][q], parameter.grad, **EXACT)
            optimiser.step()
        for name, grad in grads.items():
            weights[name].sub_(grad, alpha=0.1)
    for q, model in enumerate(models):
        state = network.export({name: tensor[q] for name, tensor in whole.items()})
        for name, tensor in model.state_dict().items():
            if "num_batches" not in name:
                assert_close(state[name], tensor, **EXACT)
    out = network(weights, x)
    for q, model in enumerate(models):
        assert_close(out.logits[q], model.eval()(x[q].permute(0, 3, 1, 2).contiguous())[1], **EXACT)
    assert_close(network.head({k: weights[k] for k in network.head_names}, out.h), out.logits, **EXACT)


def test_initial_weights_depend_on_the_generator_alone() -> None:
    network = from_module(make, shape=SHAPE)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = network.init(Generator().manual_seed(3))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = network.init(Generator().manual_seed(3)), network.init(Generator().manual_seed(4))
    assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first["conv.weight"], other["conv.weight"])


def test_export_and_load_are_inverse() -> None:
    network = from_module(make, shape=SHAPE)
    weights = network.init(Generator().manual_seed(1))
    state = network.export(weights)
    make().load_state_dict(state, strict=True)
    assert list(state) == list(make().state_dict())
    assert_close(network.load(state), weights, rtol=0, atol=0)
    with pytest.raises(UserError, match=r"the state of a model 'Net': fc.bias is missing; a tensor of shape \(5,\)"):
        network.load({name: tensor for name, tensor in state.items() if name != "fc.bias"})


class Body(nn.Module):
    """A module made of parts that a test gives."""

    def __init__(self, forward: Callable[["Body", Tensor], Any], **parts: nn.Module) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.fc = nn.Linear(3, 2)
        self.how = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Any:
        return self.how(self, x)


def usual(module: Body, x: Tensor) -> tuple[Tensor, Tensor]:
    h = module.body(x.flatten(1))
    return h, module.fc(h)


def test_low_is_the_embedding_without_a_third_output() -> None:
    network = from_module(lambda: Body(usual), shape=(2, 2, 1))
    weights = stack([network.init(Generator().manual_seed(q)) for q in range(2)])
    out = network(weights, torch.ones(2, 3, 2, 2, 1))
    assert_close(out.low, out.h)


def test_shared_parameters_are_held_once() -> None:
    def make() -> nn.Module:
        module = Body(lambda m, x: (m.twin(m.body(x.flatten(1))), m.fc(m.twin(m.body(x.flatten(1))))))
        module.body = nn.Linear(4, 4)
        module.twin = nn.Linear(4, 4)
        module.twin.weight = module.body.weight
        module.fc = nn.Linear(4, 2)
        return module

    network = from_module(make, shape=(2, 2, 1), head="fc")
    weights = network.init(Generator().manual_seed(0))
    assert "twin.weight" not in weights
    model = make()
    model.load_state_dict(network.export(weights), strict=True)
    x = torch.ones(1, 3, 2, 2, 1)
    out = network(stack([weights]), x)
    assert_close(out.logits[0], model(x[0].permute(0, 3, 1, 2))[1])


def test_parameters_that_take_no_gradient_are_buffers() -> None:
    def make() -> nn.Module:
        module = Body(usual)
        module.body.requires_grad_(False)
        return module

    assert from_module(make, shape=(2, 2, 1)).buffers == {"body.weight", "body.bias"}


def other_head(module: Body, x: Tensor) -> tuple[Tensor, Tensor]:
    h = module.body(x.flatten(1))
    return h, module.fc(h.relu())


def random_forward(module: Body, x: Tensor) -> tuple[Tensor, Tensor]:
    h = F.dropout(module.body(x.flatten(1)), 0.5, module.training)
    return h, module.fc(h)


def counting(module: Body, x: Tensor) -> tuple[Tensor, Tensor]:
    h = module.body(x.flatten(1))
    return h * float(h.sum()), module.fc(h)


@pytest.mark.parametrize(
    ("build", "head", "message"),
    [
        (lambda: Body(lambda m, x: m.body(x.flatten(1))), None, r"must return \(embedding, logits\)"),
        (lambda: Body(lambda m, x: (x, m.fc(m.body(x.flatten(1))))), None, r"\(2, 1, 2, 2\) and \(2, 2\)"),
        (lambda: Body(other_head), None, "layer 'fc' of model 'Body' does not turn the embedding into the logits"),
        (lambda: Body(usual), "body", "layer 'body' of model 'Body' does not turn the embedding"),
        (lambda: Body(usual), "head", "model 'Body' has no layer 'head'; it has body, fc"),
        (lambda: Body(random_forward), None, "draws random numbers in forward outside nn.Dropout"),
        (lambda: Body(counting), None, "runs for one client but not for a stack of them"),
        (lambda: Body(usual, drop=nn.AlphaDropout(0.5)), None, "drop is AlphaDropout"),
        (lambda: Body(usual, bn=nn.BatchNorm1d(3, momentum=None)), None, "a BatchNorm needs a momentum here"),
        (lambda: nn.Conv2d(1, 2, 2), None, "has no nn.Linear; name the output layer"),
        (lambda: "net", None, "the model's builder returned str; a torch.nn.Module is needed"),
    ],
)
def test_modules_that_do_not_fit(build: Callable[[], nn.Module], head: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_module(build, shape=(2, 2, 1), head=head)


def test_noise_is_required_in_training() -> None:
    network = from_module(make, shape=SHAPE)
    weights = stack([network.init(Generator().manual_seed(0))])
    with pytest.raises(ValueError, match=r"needs noise for features.1.u0, drop.u0, drop.u1"):
        network(weights, torch.zeros(1, 4, *SHAPE), train=True)
