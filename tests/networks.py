"""Networks as users have them, with embeddings of 64 numbers."""

import torch
from torch import nn


class Flat(nn.Module):
    def __init__(self, pixels, classes):
        super().__init__()
        self.body = nn.Linear(pixels, 64)
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        h = torch.relu(self.body(x.flatten(1)))
        return h, self.fc(h)


class Wide(nn.Module):
    """Over a hundred million weights: 410 MB."""

    def __init__(self, pixels, classes, width=800_000):
        super().__init__()
        self.wide = nn.Linear(pixels, width)
        self.narrow = nn.Linear(width, 64)
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        h = torch.relu(self.narrow(torch.relu(self.wide(x.flatten(1)))))
        return h, self.fc(h)


def wide(classes, shape):
    height, width, channels = shape
    return Wide(height * width * channels, classes)


def build(classes, shape):
    height, width, channels = shape
    return Flat(height * width * channels, classes)
