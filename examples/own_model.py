"""A network of your own: an ordinary torch module, trained as a stack with a set of weights for every client.

cd examples && fedsap run --set model.name=own_model:build --set train.rounds=20
"""

from torch import Tensor, nn


class Net(nn.Module):
    """x [B, channels, H, W] -> embedding [B, 48], logits [B, classes]; the last nn.Linear makes the logits of h."""

    def __init__(self, classes: int, height: int, width: int, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 24, 3, padding=1),
            nn.BatchNorm2d(24),  # every client has its own running statistics
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(24 * (height // 2) * (width // 2), 48),
            nn.ReLU(),
        )
        self.head = nn.Linear(48, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return h, self.head(h)


def build(classes: int, shape: tuple[int, int, int]) -> nn.Module:
    """Called once for every client; `shape` is that of an image: height, width, channels."""
    return Net(classes, *shape)
