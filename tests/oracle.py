"""The paper's procedure the slow way: one torch.nn module per client, torch.optim.SGD, a loop for everything.

Nothing here uses fedsap but its names of random streams, without which the two could not see the same batches.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fedsap.training.streams import generator, numbers


class Small(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self, classes, channels=1, side=8):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * (side // 4) ** 2, 64)
        self.fc2 = nn.Linear(64, classes)

    def forward(self, x):
        low = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(low)), 2).flatten(1)
        h = F.relu(self.fc1(x))
        return h, self.fc2(h), low.flatten(1)


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        widths = [64, 64, 128, 256, 512]
        for i in range(1, 5):
            blocks = [Block(widths[i - 1], widths[i], 1 if i == 1 else 2), Block(widths[i], widths[i], 1)]
            self.add_module(f"layer{i}", nn.Sequential(*blocks))
        self.fc = nn.Linear(512, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        low = x = self.layer1(x)
        h = self.layer4(self.layer3(self.layer2(x))).mean((2, 3))
        return h, self.fc(h), low.flatten(1)


def unit(v):
    return v / v.norm()


def cross_entropy(logits, y):
    return sum(-torch.log(torch.exp(z)[c] / torch.exp(z).sum()) for z, c in zip(logits, y, strict=True)) / len(y)


def align(h, y, bank):
    """Mean over batch and dimensions of the squared distance; classes without prototype add nothing."""
    total = sum(((v - bank[int(c)]) ** 2).sum() for v, c in zip(h, y, strict=True) if int(c) in bank)
    return total / h.numel() if isinstance(total, torch.Tensor) else h.sum() * 0


def proxy(h, y, bank, s):
    """-1/B sum log( exp(s cos(h, p_y)) / sum_c exp(s cos(h, p_c)) ) over the classes in the bank."""
    total = h.sum() * 0
    for v, c in zip(h, y, strict=True):
        if int(c) in bank:
            z = {k: s * torch.dot(unit(v), unit(p)) for k, p in bank.items()}
            top = max(float(a.detach()) for a in z.values())
            total = total - (z[int(c)] - top) + torch.log(sum(torch.exp(a - top) for a in z.values()))
    return total / len(y)


def proxy_nca(h, y, bank, s):
    """-1/B sum log( exp(-s |x - p_y|^2) / sum_{c != y} exp(-s |x - p_c|^2) ) of unit vectors."""
    total = h.sum() * 0
    for v, y_i in zip(h, y.tolist(), strict=True):
        near = {c: torch.exp(-s * (unit(v) - unit(p)).square().sum()) for c, p in bank.items()}
        others = [e for c, e in near.items() if c != y_i]
        if y_i in near and others:
            total = total - torch.log(near[y_i] / sum(others))
    return total / len(y)


def proxy_anchor(h, y, bank, s, margin=0.1):
    """Proxy by proxy: its own samples, and all others."""
    total, labels = h.sum() * 0, y.tolist()
    seen = [c for c in bank if c in labels]
    for c, p in bank.items():
        cosines = [torch.dot(unit(v), unit(p)) for v in h]
        own = sum(torch.exp(-s * (k - margin)) for k, y_i in zip(cosines, labels, strict=True) if y_i == c)
        rest = sum(torch.exp(s * (k + margin)) for k, y_i in zip(cosines, labels, strict=True) if y_i != c)
        total = total + torch.log(1 + rest + h.sum() * 0) / len(bank)
        if c in seen:
            total = total + torch.log(1 + own) / len(seen)
    return total


def contrast(h, y, bank, tau=0.5, base=0.07):
    """Supervised contrast over the batch and a copy of each sample's prototype, anchor by anchor."""
    u = [*h, *[bank.get(int(c), v.detach()) for v, c in zip(h, y, strict=True)]]
    label = [*y.tolist(), *y.tolist()]
    total = h.sum() * 0
    for a in range(len(u)):
        others = [k for k in range(len(u)) if k != a]
        denominator = sum(torch.exp(torch.dot(u[a], u[k]) / tau) for k in others)
        alike = [k for k in others if label[k] == label[a]]
        log_p = [torch.dot(u[a], u[p]) / tau - torch.log(denominator) for p in alike]
        total = total - sum(log_p) / len(alike)
    return tau / base * total / len(u)


def soften(logits, y, soft, temperature):
    total = logits.sum() * 0
    for z, c in zip(logits, y, strict=True):
        if int(c) in soft:
            p = torch.softmax(soft[int(c)] / temperature, 0)
            q = torch.softmax(z / temperature, 0)
            total = total + (p * (p.log() - q.log())).sum()
    return total / len(y)


def means(vectors, labels):
    by_class = {}
    for v, c in zip(vectors, labels, strict=True):
        by_class.setdefault(int(c), []).append(v)
    return {c: sum(vs) / len(vs) for c, vs in by_class.items()}


def combine(per_client):
    by_class = {}
    for protos in per_client:
        for c, p in protos.items():
            by_class.setdefault(c, []).append(p)
    return {c: sum(ps) / len(ps) for c, ps in by_class.items()}


def batches(seed, client, t, number, n, size):
    """Indices of each batch of a client's epoch `number` of round t; a short last one is left out unless it is all."""
    order = torch.from_numpy(numbers(seed, "batches", client, t * 1000 + number).permutation(n))
    full = n // size
    return [order[i * size : (i + 1) * size] for i in range(full)] or [order]


def average(states, shares):
    """The mean of state_dicts, entry by entry."""
    return {
        k: sum(n * s[k] for n, s in zip(shares, states, strict=True)) / sum(shares)
        for k, v in states[0].items()
        if v.is_floating_point()
    }


def put(model, state):
    """Loads what a state_dict has of a module's weights."""
    assert not model.load_state_dict(state, strict=False).unexpected_keys


def sgd(parameters, lr=0.05):
    """The optimiser of `federations.pair`."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.5)


class Federation:
    """`method` is one of local, fedavg, fedproto, fedsap, fedmps; `options` holds its numbers."""

    def __init__(self, method, models, images, labels, *, seed, batch, lr, momentum, epochs=1, **options):
        self.method, self.models, self.images, self.labels = method, models, images, labels
        self.seed, self.batch, self.lr, self.momentum, self.epochs = seed, batch, lr, momentum, epochs
        self.options = options
        self.banks = {}
        self.head = options.get("head")
        self.losses = []

    def loss(self, t, h, logits, low, y):
        o, banks = self.options, self.banks
        terms = {"ce": cross_entropy(logits, y)}
        if self.method in ("fedproto", "fedsap") and banks:
            rate = o["align"](t) if self.method == "fedsap" else o["align"]
            terms["align"] = rate * align(h, y, banks["proto"])
            if self.method == "fedsap":
                terms["proxy"] = o["proxy"] * proxy(h, y, banks["proto"], o["scale"])
        if self.method == "fedmps" and banks:
            high, low = torch.stack([unit(v) for v in h]), torch.stack([unit(v) for v in low])
            terms["high"] = o["high"] * contrast(high, y, banks["high"])
            terms["low"] = o["low"] * contrast(low, y, banks["low"])
            terms["soft"] = o["soft"] * soften(logits, y, banks["soft"], o["temperature"])
        return terms

    def client(self, q, t):
        model, x, y = self.models[q].train(), self.images[q], self.labels[q]
        optimiser = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)
        seen, history = [], []
        for e in range(self.epochs):
            for b in batches(self.seed, q, t, e, len(y), self.batch):
                h, logits, low = model(x[b])
                terms = self.loss(t, h, logits, low, y[b])
                optimiser.zero_grad()
                sum(terms.values()).backward()
                optimiser.step()
                history.append({k: float(v.detach()) for k, v in terms.items()})
                if e == self.epochs - 1:
                    seen += [(h[i].detach(), low[i].detach(), int(y[b][i])) for i in range(len(b))]
        self.losses.append({k: float(np.mean([s[k] for s in history])) for k in history[0]})
        return seen

    @torch.no_grad()
    def round(self, t):
        self.losses = []
        with torch.enable_grad():
            seen = [self.client(q, t) for q in range(len(self.models))]
        if self.method == "fedavg":
            sizes = [len(y) for y in self.labels]
            states = [m.state_dict() for m in self.models]
            mean = {
                k: sum(n * s[k].double() for n, s in zip(sizes, states, strict=True)) / sum(sizes) for k in states[0]
            }
            for m in self.models:
                m.load_state_dict(mean)
        if self.method == "fedproto":
            self.banks = {"proto": combine([means([h for h, _, _ in s], [c for *_, c in s]) for s in seen])}
        if self.method == "fedsap":
            local = []
            for m, x, y in zip(self.models, self.images, self.labels, strict=True):
                local.append(means(m.eval()(x)[0], y))
            self.banks = {"proto": combine(local)}
        if self.method == "fedmps":
            labels = [[c for *_, c in s] for s in seen]
            high = [means([unit(h) for h, _, _ in s], c) for s, c in zip(seen, labels, strict=True)]
            low = [means([unit(v) for _, v, _ in s], c) for s, c in zip(seen, labels, strict=True)]
            self.banks = {"high": combine(high), "low": combine(low), "soft": self.server(t, high)}

    def server(self, t, high):
        """An output layer trained on the local prototypes; the mean logits of each class."""
        points = torch.stack([p for protos in high for _, p in sorted(protos.items())])
        labels = torch.tensor([c for protos in high for c in sorted(protos)])
        g = generator(self.seed, "server", t=t)
        optimiser = torch.optim.Adam(self.head.parameters(), lr=1e-3)
        with torch.enable_grad():
            for _ in range(6):
                for chosen in torch.randperm(len(points), generator=g).split(4):
                    optimiser.zero_grad()
                    F.cross_entropy(self.head(points[chosen]), labels[chosen]).backward()
                    optimiser.step()
        return combine([{c: self.head(p) for c, p in protos.items()} for protos in high])

    @torch.no_grad()
    def accuracy(self, images, labels, owned, bank):
        """Head, head over own classes, nearest prototype by L2 and by cosine, one sample after another."""
        found = []
        for q, model in enumerate(self.models):
            right = dict.fromkeys(("head", "head_own", "proto", "proto_cos"), 0)
            for x, y in zip(images[q], labels[q], strict=True):
                h, logits, _ = (v[0] for v in model.eval()(x[None]))
                guesses = {
                    "head": int(logits.argmax()),
                    "head_own": max(owned[q], key=lambda c: float(logits[c])),
                    "proto": min(owned[q], key=lambda c: float((h - bank[c]).norm()) if c in bank else math.inf),
                    "proto_cos": max(owned[q], key=lambda c: float(torch.dot(unit(h), unit(bank[c])))),
                }
                for k, guess in guesses.items():
                    right[k] += guess == int(y)
            found.append({k: n / len(labels[q]) for k, n in right.items()})
        return found
