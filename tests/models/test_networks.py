"""Each network, stacked, against a plain torch.nn module per client: outputs, gradients, statistics, several steps."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.testing import assert_close

from fedsap.errors import UserError
from fedsap.models import CNN, Features, Network, ResNet18, Small, Weights, build, count, stack

NETWORKS = [
    Small(5, (8, 8, 1)),
    CNN(5, (20, 20, 1)),
    ResNet18(5, (32, 32, 3)),
]
names = pytest.mark.parametrize("network", NETWORKS, ids=lambda n: type(n).__name__)

EXACT = {"rtol": 1e-9, "atol": 1e-9}
Noise = Mapping[str, Tensor]


def head(e: Tensor, layer: nn.Linear, kind: str) -> Tensor:
    if kind == "cosine":
        return torch.stack([torch.stack([16 * F.cosine_similarity(v, w, dim=0) for w in layer.weight]) for v in e])
    return layer(e / e.norm(dim=1, keepdim=True) if kind == "normalized" else e)


def projected(width: int, dim: int | None) -> nn.Module:
    return nn.Identity() if dim is None else nn.Linear(width, dim)


class PlainSmall(nn.Module):
    def __init__(
        self, classes: int, shape: tuple[int, int, int], embedding: str, head_input: str, dim: int | None = None
    ) -> None:
        super().__init__()
        height, width, channels = shape
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * (height // 4) * (width // 4), 64)
        self.project = projected(64, dim)
        self.fc2 = nn.Linear(dim or 64, classes)
        self.embedding, self.head_input = embedding, head_input

    def forward(self, x: Tensor, _noise: Noise) -> tuple[Tensor, Tensor, Tensor]:
        low = F.max_pool2d(F.relu(self.conv1(x)), 2)
        h = self.fc1(F.max_pool2d(F.relu(self.conv2(low)), 2).flatten(1))
        h = self.project(h if self.embedding == "linear" else F.relu(h))
        logits = head(h, self.fc2, self.head_input)
        return h / h.norm(dim=1, keepdim=True) if self.embedding == "unit" else h, logits, low.flatten(1)


class PlainCNN(nn.Module):
    def __init__(
        self, classes: int, shape: tuple[int, int, int], dropout: float, head_input: str, dim: int | None = None
    ) -> None:
        super().__init__()
        height, width = (((n - 2) // 2 - 4) // 2 for n in shape[:2])
        self.conv1 = nn.Conv2d(shape[2], 10, 3)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.fc1 = nn.Linear(20 * height * width, 50)
        self.project = projected(50, dim)
        self.fc2 = nn.Linear(dim or 50, classes)
        self.p, self.head_input = dropout, head_input

    def forward(self, x: Tensor, noise: Noise) -> tuple[Tensor, Tensor, Tensor]:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = self.conv2(x)
        if self.training and self.p:
            x = x * (noise["conv2"] >= self.p)[:, :, None, None] / (1 - self.p)
        low = F.relu(F.max_pool2d(x, 2)).flatten(1)
        h = self.project(F.relu(self.fc1(low)))
        read = h if self.head_input == "raw" else F.normalize(h)
        if self.training and self.p:
            read = read * (noise["fc1"] >= self.p) / (1 - self.p)
        return h, self.fc2(read) if self.head_input != "cosine" else 16 * read @ F.normalize(self.fc2.weight).T, low


class PlainBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class PlainResNet18(nn.Module):
    def __init__(
        self,
        classes: int,
        resolution: int | None = None,
        stem: int = 4,
        embedding: str = "relu",
        kind: str = "raw",
        dim: int | None = None,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2 if stem == 4 else 1, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(PlainBlock(64, 64, 1), PlainBlock(64, 64, 1))
        self.layer2 = nn.Sequential(PlainBlock(64, 128, 2), PlainBlock(128, 128, 1))
        self.layer3 = nn.Sequential(PlainBlock(128, 256, 2), PlainBlock(256, 256, 1))
        self.layer4 = nn.Sequential(PlainBlock(256, 512, 2), PlainBlock(512, 512, 1))
        self.project = projected(512, dim)
        self.fc = nn.Linear(dim or 512, classes)
        self.resolution, self.stem, self.embedding, self.kind = resolution, stem, embedding, kind

    def forward(self, x: Tensor, _noise: Noise) -> tuple[Tensor, Tensor, Tensor]:
        if self.resolution is not None:
            x = F.interpolate(x, size=(self.resolution, self.resolution), mode="bilinear", align_corners=False)
        x = x.repeat(1, 3 // x.shape[1], 1, 1)
        x = F.relu(self.bn1(self.conv1(x)))
        low = self.layer1(x if self.stem == 1 else F.max_pool2d(x, 3, 2, 1))
        x = self.layer4[0](self.layer3(self.layer2(low)))
        block = self.layer4[1]
        x = block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x))))) + x
        e = self.project(F.adaptive_avg_pool2d(x if self.embedding == "linear" else F.relu(x), 1).flatten(1))
        return F.normalize(e) if self.embedding == "unit" else e, head(e, self.fc, self.kind), low.flatten(1)


def images(steps: int, clients: int, batch: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(steps, clients, batch, *shape, generator=Generator().manual_seed(5), dtype=torch.float64)


def loss(h: Tensor, logits: Tensor, low: Tensor, y: Tensor) -> Tensor:
    """Reaches all three outputs. Mean over the batch; summed over clients where there is a client axis."""
    ce = F.cross_entropy(logits.movedim(-1, 1), y, reduction="none").mean(-1).sum()
    return ce + 0.1 * h.square().mean((-2, -1)).sum() + 0.1 * low.square().mean((-2, -1)).sum()


def check(
    network: Network,
    plain: Callable[[], nn.Module],
    shape: tuple[int, ...],
    *,
    clients: int = 3,
    batch: int = 3,
    steps: int = 3,
    reads_before: bool = False,
) -> None:
    """Some steps of SGD with momentum, on a prefix of a larger stack, against torch.optim.SGD client by client."""
    one_by_one = [network.init(Generator().manual_seed(q)) for q in range(clients + 1)]
    whole = {name: tensor.double() for name, tensor in stack(one_by_one).items()}
    untouched = {name: tensor[clients].clone() for name, tensor in whole.items()}
    prefix = {name: tensor[:clients] for name, tensor in whole.items()}
    models = []
    for q in range(clients):
        model = plain().double().train()
        model.load_state_dict(network.export({name: tensor[q] for name, tensor in whole.items()}), strict=True)
        models.append(model)
    optimisers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5) for model in models]
    momentum: Weights = {}
    x = images(steps, clients, batch, shape)
    draw = Generator().manual_seed(6)
    for step in range(steps):
        y = torch.randint(network.classes, (clients, batch), generator=draw)
        noise = {name: torch.rand(clients, batch, *size, generator=draw) for name, size in network.noise.items()}
        leaves = {k: v.detach().requires_grad_() for k, v in prefix.items() if k not in network.buffers}
        out = network({**prefix, **leaves}, x[step], train=True, noise=noise)
        grads = torch.autograd.grad(loss(out.h, out.logits, out.low, y), list(leaves.values()), materialize_grads=True)
        for q, (model, optimiser) in enumerate(zip(models, optimisers, strict=True)):
            own = {name: value[q] for name, value in noise.items()}
            outputs = model(x[step, q].permute(0, 3, 1, 2), own)
            assert_close((out.h[q], out.logits[q], out.low[q]), outputs, **EXACT)
            optimiser.zero_grad()
            loss(*outputs, y[q]).backward()
            got = network.export({name: grad[q] for name, grad in zip(leaves, grads, strict=True)})
            for name, parameter in model.named_parameters():
                given = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                assert_close(got[name], given, **EXACT, msg=lambda m, name=name: f"{name}: {m}")
            optimiser.step()
        for (name, _), grad in zip(leaves.items(), grads, strict=True):
            momentum[name] = grad if name not in momentum else 0.5 * momentum[name] + grad
            prefix[name].sub_(momentum[name], alpha=0.01)
    for q, model in enumerate(models):
        model.eval()
        got = network.export({name: tensor[q] for name, tensor in prefix.items()})
        for name, tensor in model.state_dict().items():
            if "num_batches" not in name:
                assert_close(got[name], tensor, **EXACT, msg=lambda m, name=name: f"{name}: {m}")
    out = network(prefix, x[0])
    for q, model in enumerate(models):
        assert_close((out.h[q], out.logits[q], out.low[q]), model(x[0, q].permute(0, 3, 1, 2), {}), **EXACT)
    head = {name: prefix[name] for name in network.head_names}
    if not reads_before:
        assert_close(network.head(head, out.h), out.logits, **EXACT)
    assert (out.h.shape[2], out.low.shape[2], out.logits.shape[2]) == (network.dim, network.low_dim, network.classes)
    assert_close({name: tensor[clients] for name, tensor in whole.items()}, untouched, rtol=0, atol=0)


@pytest.mark.parametrize("embedding", ["relu", "linear", "unit"])
@pytest.mark.parametrize("head_input", ["raw", "normalized", "cosine"])
@pytest.mark.parametrize("shape", [(8, 8, 1), (11, 9, 3)])
def test_small(shape: tuple[int, int, int], head_input: str, embedding: str) -> None:
    network = build("small", classes=5, shape=shape, head_input=head_input, embedding=embedding)
    before = (embedding, head_input) == ("unit", "raw")
    check(network, lambda: PlainSmall(5, shape, embedding, head_input), shape, reads_before=before)


@pytest.mark.parametrize("head_input", ["raw", "normalized", "cosine"])
@pytest.mark.parametrize("dropout", [0.0, 0.3, 0.5])
def test_cnn(dropout: float, head_input: str) -> None:
    shape = (20, 18, 2)
    network = build("cnn", classes=7, shape=shape, dropout=dropout, head_input=head_input)
    check(network, lambda: PlainCNN(7, shape, dropout, head_input), shape)


def test_resnet18() -> None:
    # With fewer images, layer4's statistics are of so few values that rounding alone grows past 1e-9 in three steps.
    network = build("resnet18", classes=4, shape=(32, 32, 3))
    check(network, lambda: PlainResNet18(4), (32, 32, 3), clients=2, batch=8, steps=2)


@pytest.mark.parametrize(("stem", "embedding", "kind"), [(2, "linear", "cosine"), (1, "unit", "normalized")])
def test_resnet18_in_other_readings(stem: int, embedding: str, kind: str) -> None:
    network = ResNet18(4, (16, 16, 3), stem_stride=stem, embedding=embedding, head_input=kind)
    plain = lambda: PlainResNet18(4, stem=stem, embedding=embedding, kind=kind)  # noqa: E731
    check(network, plain, (16, 16, 3), clients=1, batch=8, steps=2)


@pytest.mark.parametrize(("embedding", "head_input"), [("relu", "raw"), ("linear", "cosine"), ("unit", "normalized")])
def test_small_with_a_projection(embedding: str, head_input: str) -> None:
    network = build("small", classes=5, shape=(8, 8, 1), head_input=head_input, embedding=embedding, dim=7)
    assert network.dim == 7
    check(network, lambda: PlainSmall(5, (8, 8, 1), embedding, head_input, 7), (8, 8, 1))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_cnn_with_a_projection(dropout: float) -> None:
    network = build("cnn", classes=7, shape=(20, 18, 2), dropout=dropout, dim=64)
    check(network, lambda: PlainCNN(7, (20, 18, 2), dropout, "raw", 64), (20, 18, 2))


def test_resnet18_with_a_projection() -> None:
    network = build("resnet18", classes=4, shape=(32, 32, 3), dim=50)
    check(network, lambda: PlainResNet18(4, dim=50), (32, 32, 3), clients=2, batch=8, steps=2)


@names
def test_networks_meet_in_the_dimension_that_is_asked_for(network: Network) -> None:
    other = replace(network, dim=33)
    weights = other.init(Generator().manual_seed(0))
    h = other(stack([weights]), torch.zeros(1, 2, *network.shape)).h
    assert h.shape == (1, 2, 33)
    assert set(weights) - set(network.init(Generator().manual_seed(0))) == {"project.weight", "project.bias"}
    assert not {"project.weight", "project.bias"} & set(other.head_names)  # it belongs to the body
    own = replace(network, dim=network.dim).init(Generator().manual_seed(0))
    assert_close(own, network.init(Generator().manual_seed(0)), rtol=0, atol=0)


def test_resnet18_on_its_live_taps_alone() -> None:
    network = ResNet18(classes=4, shape=(32, 32, 3))
    weights = stack([network.init(Generator().manual_seed(q)) for q in range(2)])
    live = network.live(weights)
    grads = []
    for values in (weights, live):
        leaves = {k: v.detach().requires_grad_() for k, v in values.items() if k not in network.buffers}
        out = network({**values, **leaves}, images(1, 2, 4, (32, 32, 3))[0].float(), train=True)
        grads.append(dict(zip(leaves, torch.autograd.grad(out.logits.sum(), list(leaves.values())), strict=True)))
    whole = network.live(grads[0])
    assert_close(grads[1], whole)
    live["layer4.1.conv2.weight"].zero_()
    assert float(weights["layer4.1.conv2.weight"][:, 1, 1].abs().max()) == 0


def test_resnet18_resizes_and_takes_grey_images() -> None:
    network = ResNet18(classes=4, shape=(10, 12, 1), resolution=33)
    weights = network.init(Generator().manual_seed(0))
    model = PlainResNet18(4, resolution=33).eval()
    model.load_state_dict(network.export(weights), strict=True)
    x = images(1, 1, 2, (10, 12, 1))[0].float()
    out = network(stack([weights]), x)
    expected = model(x[0].permute(0, 3, 1, 2), {})
    assert_close((out.h[0], out.logits[0], out.low[0]), expected, rtol=1e-4, atol=1e-4)
    assert out.low.shape[2] == network.low_dim


def test_resnet18_head_reads_the_normalized_embedding() -> None:
    network = ResNet18(classes=4, shape=(32, 32, 3), head_input="normalized")
    weights = stack([network.init(Generator().manual_seed(0))])
    out = network(weights, images(1, 1, 2, (32, 32, 3))[0].float())
    assert_close(out.logits[0], F.linear(F.normalize(out.h[0]), weights["fc.weight"][0], weights["fc.bias"][0]))


@pytest.mark.parametrize(
    ("name", "classes", "shape", "weights"),
    [
        ("cnn", 62, (128, 128, 1), 849_332),
        ("cnn", 62, (28, 28, 1), 24_332),
        ("resnet18", 10, (32, 32, 3), 11_181_642),
        ("resnet18", 100, (32, 32, 3), 11_227_812),
        ("small", 10, (8, 8, 1), 13_706),
    ],
)
def test_number_of_weights(name: str, classes: int, shape: tuple[int, int, int], weights: int) -> None:
    assert count(build(name, classes=classes, shape=shape)) == weights


def test_dead_weights_of_resnet18_at_32() -> None:
    network = ResNet18(classes=10, shape=(32, 32, 3))
    weights = stack([network.init(Generator().manual_seed(0))])
    live = network.live(weights)
    assert sum(weights[k].numel() - live[k].numel() for k in weights) == 6_946_816
    assert all(live[k].data_ptr() >= weights[k].data_ptr() for k in weights)


@names
def test_export_and_load_are_inverse(network: Network) -> None:
    weights = network.init(Generator().manual_seed(1))
    again = network.load(network.export(weights))
    assert list(again) == list(weights)
    assert_close(again, weights, rtol=0, atol=0)
    assert all(again[k].data_ptr() != weights[k].data_ptr() for k in weights)


@names
def test_initial_weights_depend_on_the_generator_alone(network: Network) -> None:
    torch.manual_seed(1)
    first = network.init(Generator().manual_seed(3))
    torch.manual_seed(2)
    again, other = network.init(Generator().manual_seed(3)), network.init(Generator().manual_seed(4))
    assert_close(first, again, rtol=0, atol=0)
    head = network.head_names[0]
    assert not torch.equal(first[head], other[head])
    assert {t.dtype for t in first.values()} == {torch.float32}


@names
def test_load_names_what_is_wrong(network: Network) -> None:
    state = network.export(network.init(Generator().manual_seed(0)))
    first, head = next(iter(state)), network.head_names[0]
    with pytest.raises(UserError, match=rf"{head} is missing; a tensor of shape \(5, "):
        network.load({k: v for k, v in state.items() if k != head})
    with pytest.raises(UserError, match=rf"{head} has shape \(6, 2\); \(5, .* is needed"):
        network.load({**state, head: torch.zeros(6, 2)})
    with pytest.raises(UserError, match=r"extra.weight is unknown"):
        network.load({**state, "extra.weight": torch.zeros(1)})
    with pytest.raises(UserError, match=rf"{first} holds torch.int64; floating point numbers"):
        network.load({**state, first: torch.zeros(1, dtype=torch.long)})


def test_initial_weights_follow_torchs_rules() -> None:
    cnn = CNN(62, (128, 128, 1)).init(Generator().manual_seed(0))
    bound = 16_820**-0.5
    assert 0.99 * bound < float(cnn["fc1.weight"].abs().max()) <= bound
    resnet = ResNet18(10, (32, 32, 3)).init(Generator().manual_seed(0))
    kernel = resnet["layer3.1.conv2.weight"]
    assert abs(float(kernel.std()) - (2 / (256 * 9)) ** 0.5) < 1e-4
    assert float(resnet["bn1.weight"].min()) == float(resnet["bn1.running_var"].max()) == 1
    assert float(resnet["layer4.1.bn2.bias"].abs().max()) == float(resnet["bn1.running_mean"].abs().max()) == 0


def test_dropout_without_noise_is_refused() -> None:
    network = CNN(5, (20, 20, 1))
    weights = stack([network.init(Generator().manual_seed(0))])
    with pytest.raises(ValueError, match="needs noise for conv2, fc1"):
        network(weights, torch.zeros(1, 2, 20, 20, 1), train=True)


def test_evaluation_ignores_the_noise() -> None:
    network = CNN(5, (20, 20, 1))
    weights = stack([network.init(Generator().manual_seed(0))])
    x = images(1, 1, 2, (20, 20, 1))[0].float()
    noise = {"conv2": torch.zeros(1, 2, 20), "fc1": torch.zeros(1, 2, 50)}
    assert_close(network(weights, x, noise=noise).logits, network(weights, x).logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CNN(5, (13, 20, 1)), "model 'cnn' needs images of at least 14x14; these are 13x20"),
        (lambda: Small(5, (3, 8, 1)), "model 'small' needs images of at least 4x4; these are 3x8"),
        (lambda: ResNet18(5, (32, 32, 2)), "takes images with 1 or 3 channels; these have 2"),
        (lambda: CNN(5, (20, 20, 1), dropout=1.0), "model.dropout is 1.0; it takes a number from 0 to below 1"),
        (lambda: Small(5, (8, 8, 1), embedding="tanh"), "model.embedding is 'tanh'; it takes 'relu' or 'linear'"),
        (lambda: ResNet18(5, (8, 8, 3), stem_stride=3), "model.stem_stride is 3; it takes 4, 2 or 1"),
        (lambda: CNN(5, (20, 20, 1), head_scale=0.0), "model.head_scale is 0.0; it takes a number above 0"),
        (lambda: ResNet18(5, (8, 8, 1), head_input="unit"), "model.head_input is 'unit'; it takes 'raw' or 'normal"),
        (lambda: ResNet18(5, (8, 8, 1), resolution=0), "model.resolution is 0"),
        (lambda: ResNet18(5, (8, 8, 1), dim=0), "model.dim is 0; it takes a number from 1"),
        (lambda: Small(0, (8, 8, 1)), "model 'small' needs at least 1 class; it was given 0"),
    ],
)
def test_options_that_do_not_fit(make: Callable[[], Network], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_features_of_the_smallest_images() -> None:
    for network in (CNN(5, (14, 14, 1)), Small(5, (4, 4, 1))):
        weights = stack([network.init(Generator().manual_seed(0))])
        out = network(weights, torch.zeros(1, 2, *network.shape))
        assert isinstance(out, Features)
        assert out.low.shape == (1, 2, network.low_dim)
