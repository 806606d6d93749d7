"""Classes of image files by one client's model."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedsap.data import Pixels
from fedsap.data.augment import normalise
from fedsap.data.decode import decode
from fedsap.errors import UserError
from fedsap.message import PerClass
from fedsap.saved import Model

By = Literal["head", "proto", "cos"]
Among = Literal["own", "all"]
BATCH = 32  # images at once: what is held does not grow with their number
LARGEST = 2**28  # bytes of a file that is read


@dataclass(frozen=True)
class Guess:
    """What is seen in one image.

    score: the probability (head), the cosine (cos), or minus the distance (proto); margin: by how much it is larger
    than that of `second`, the next best class. Both are None where there is one class to choose from.
    """

    path: str
    name: str
    score: float
    second: str | None
    margin: float | None


@dataclass(frozen=True)
class Failure:
    """A file that is no image that can be read, and why."""

    path: str
    reason: str


def predict(model: Model, paths: Iterable[Path], by: By, among: Among) -> Iterator[Guess | Failure]:
    """One after the other, in the order of the paths; files are read as the answers are taken."""
    candidates = allowed(model, by, among)
    each = files(paths)
    with ThreadPoolExecutor(min(BATCH, os.cpu_count() or 1)) as pool:
        while batch := list(islice(each, BATCH)):
            read = list(pool.map(lambda path: image(path, model.pixels), batch))
            good = [one for one in read if not isinstance(one, str)]
            stack = torch.from_numpy(np.stack(good)).to(candidates.device) if good else None
            found = iter([] if stack is None else top(model, scores(model, stack, by, candidates)))
            for path, one in zip(batch, read, strict=True):
                yield Failure(shown(path), one) if isinstance(one, str) else Guess(shown(path), *next(found))


def files(paths: Iterable[Path]) -> Iterator[Path]:
    """The paths, and in the place of a folder what is in and below it, sorted; what begins with a dot is left out.

    A folder that is empty or cannot be read stands for itself: it is not passed over without a word.
    """
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        closed: list[OSError] = []
        any_file = False
        for parent, folders, names in os.walk(path, onerror=closed.append):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            here = sorted(name for name in names if not name.startswith("."))
            any_file = any_file or bool(here)
            yield from (Path(parent, name) for name in here)
        yield from (Path(error.filename) for error in closed)
        if not any_file and not closed:
            yield path


def image(path: Path, pixels: Pixels) -> NDArray[np.uint8] | str:
    """The image [H, W, C] as the network's data set has its images, or why there is none."""
    height, width, channels = pixels.shape
    if height != width:
        raise UserError(f"the network takes images of {height}x{width} pixels; only square ones can be read from files")
    if path.exists() and not path.is_file():
        return "no file, or a folder without any that can be read"
    try:
        if path.stat().st_size > LARGEST:
            return f"larger than {LARGEST // 2**20} MB"
        return decode(path.read_bytes(), "", channels=channels, size=height)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except UserError as error:
        return str(error).removeprefix(": ")


def shown(path: Path) -> str:
    """A path as text that can be printed, whatever bytes are in it.

    >>> shown(Path("a/b.png"))
    'a/b.png'
    """
    return str(path).encode("utf-8", "backslashreplace").decode("utf-8")


def allowed(model: Model, by: By, among: Among) -> Tensor:
    """The classes to choose from, bool [C]; UserError if there is none."""
    chosen = torch.zeros(len(model.classes), dtype=torch.bool)
    chosen[list(model.owned) if among == "own" else slice(None)] = True
    if by != "head":
        if model.bank is None:
            raise UserError(f"--by: got {by}, but {model.method.title} keeps no prototypes; takes head")
        chosen &= model.bank.mask.cpu()
        if not chosen.any():
            raise UserError("--classes: got own, but none of the client's classes has a prototype; takes all")
    return chosen.to(next(iter(model.weights.values())).device)


@torch.no_grad()
def scores(model: Model, images: Tensor, by: By, candidates: Tensor) -> Tensor:
    """How well each class fits, [B, C], larger is better; minus infinity for those that are not to choose from.

        head   softmax of the logits over the candidates
        proto  -||h - p_c||
        cos    cos(h, p_c)

    images: uint8 [B, H, W, C], candidates: bool [C]
    """
    h, logits = model(normalise(images, model.pixels.mean, model.pixels.std))
    if by == "head":
        return logits.masked_fill(~candidates, -torch.inf).softmax(-1).masked_fill(~candidates, -torch.inf)
    assert model.bank is not None
    return likeness(h, model.bank, by).masked_fill(~candidates, -torch.inf)


def likeness(h: Tensor, bank: PerClass, by: By) -> Tensor:
    """Cosine of each embedding with each prototype, or minus their distance. h: [B, d], bank: [C, d] -> [B, C]

    >>> bank = PerClass(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.ones(2, dtype=torch.bool))
    >>> likeness(torch.tensor([[3.0, 4.0]]), bank, "proto")
    tensor([[-4.0000, -4.2426]])
    """
    if by == "cos":
        cosine: Tensor = F.normalize(h, dim=-1) @ F.normalize(bank.values, dim=-1).mT
        return cosine
    distance: Tensor = (h[:, None] - bank.values).square().sum(-1).sqrt()
    return -distance


def top(model: Model, found: Tensor) -> list[tuple[str, float, str | None, float | None]]:
    """The best class, its score, the next best and how far it is behind, of each row of `scores`."""
    best = found.topk(min(2, found.shape[1]))
    rows = []
    for values, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        alone = len(values) < 2 or values[1] == -torch.inf
        second = (None, None) if alone else (model.classes[index[1]], values[0] - values[1])
        rows.append((model.classes[index[0]], values[0], *second))
    return rows
