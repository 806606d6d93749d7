"""Local training the usual way: one torch.nn module per client, one client after another.

It does the same job as `fedsap.training.local` in the simplest terms, for people who want to read the procedure
without the client axis, and for `fedsap bench`, which times the one against the other.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsap.models.network import Weights


class SmallNet(nn.Module):
    """The network `small` as a torch.nn module with the same names."""

    def __init__(self, classes: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        height, width, channels = shape
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * (height // 4) * (width // 4), 64)
        self.fc2 = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        h = F.relu(self.fc1(x.flatten(1)))
        return h, self.fc2(h)


class CNNNet(nn.Module):
    """The network `cnn` without dropout, as a torch.nn module with the same names."""

    def __init__(self, classes: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        height, width, channels = shape
        side = [((n - 2) // 2 - 4) // 2 for n in (height, width)]
        self.conv1 = nn.Conv2d(channels, 10, 3)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.fc1 = nn.Linear(20 * side[0] * side[1], 50)
        self.fc2 = nn.Linear(50, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        h = F.relu(self.fc1(x.flatten(1)))
        return h, self.fc2(h)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and what goes around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.downsample(x))


class ResNet18Net(nn.Module):
    """The network `resnet18` as a torch.nn module in torchvision's layout."""

    def __init__(self, classes: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.fc = nn.Linear(512, classes)
        self.grey = shape[2] == 1

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.repeat(1, 3, 1, 1) if self.grey else x
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        h = self.layer4(self.layer3(self.layer2(self.layer1(x)))).mean((2, 3))
        return h, self.fc(h)


NETWORKS: dict[str, type[nn.Module]] = {"small": SmallNet, "cnn": CNNNet, "resnet18": ResNet18Net}


@dataclass(frozen=True)
class Settings:
    """What FedSAP's local training is told."""

    lr: float
    momentum: float
    align: float
    proxy: float
    scale: float


def local_round(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    batches: list[Tensor],
    bank: dict[int, Tensor],
    settings: Settings,
) -> dict[int, Tensor]:
    """One round of FedSAP on one client; its prototypes, by class.

    images: [N, C, H, W] floats, labels: [N], batches: indices of each mini-batch, bank: the prototype [d] of each
    class.
    """
    local_steps(model, images, labels, batches, bank, settings)
    return prototypes(model, images, labels)


def local_steps(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    batches: list[Tensor],
    bank: dict[int, Tensor],
    settings: Settings,
) -> None:
    """The training in it:

    L = CE(logits, y) + align * MSE(h, bank[y]) + proxy * CE(scale * cos(h, bank), y)
    """
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    order = sorted(bank)
    proxies = F.normalize(torch.stack([bank[c] for c in order]), dim=1) if bank else None
    place = {c: i for i, c in enumerate(order)}
    for batch in batches:
        x, y = images[batch], labels[batch]
        h, logits = model(x)
        loss = F.cross_entropy(logits, y)
        if proxies is not None:
            target = torch.stack([bank.get(c, v.detach()) for c, v in zip(y.tolist(), h, strict=True)])
            loss = loss + settings.align * F.mse_loss(h, target)
            known = torch.tensor([c in bank for c in y.tolist()], device=y.device)
            where = torch.tensor([place[c] for c in y.tolist() if c in bank], device=y.device)
            cosines = F.normalize(h[known], dim=1) @ proxies.T
            loss = loss + settings.proxy * F.cross_entropy(settings.scale * cosines, where, reduction="sum") / len(y)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()


@torch.no_grad()
def prototypes(model: nn.Module, images: Tensor, labels: Tensor) -> dict[int, Tensor]:
    """The mean embedding of each class."""
    model.eval()
    h, _ = model(images)
    return {c: h[labels == c].mean(0) for c in sorted(set(labels.tolist()))}


def average(local: list[dict[int, Tensor]]) -> dict[int, Tensor]:
    """The bank: for each class, the mean of the prototypes of the clients that have it."""
    classes = sorted({c for protos in local for c in protos})
    return {c: torch.stack([protos[c] for protos in local if c in protos]).mean(0) for c in classes}


def module(name: str, classes: int, shape: tuple[int, int, int], state: Weights) -> nn.Module:
    """The torch.nn counterpart of a network, with the given weights."""
    made = NETWORKS[name](classes, shape)
    made.load_state_dict(state, strict=False)
    return made
