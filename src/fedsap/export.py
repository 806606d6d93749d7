"""A client's model as an ONNX graph that other programs run, checked against the model itself."""

import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import fedsap
from fedsap.data import load
from fedsap.data.augment import normalise
from fedsap.errors import UserError
from fedsap.models import ModuleNetwork
from fedsap.predict import files, image, likeness
from fedsap.runs import plainly
from fedsap.saved import Model

OPSET = 18
TOLERANCE = 1e-4  # of an output's largest value, or of 1 where all are smaller
CHECKED = 64  # images that the two are compared on, at most


class Graph(nn.Module):
    """uint8 images [N, H, W, C] -> logits [N, C] and embedding [N, d]; with a bank also cosine and distance, [N, C].

    A class without prototype has the cosine -inf and the distance inf.
    """

    bank: Tensor
    seen: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model, self._names = model, {}
        sets = {"weights": model.weights, **{f"state/{name}": part for name, part in model.state.items()}}
        for kind, part in sets.items():
            self._names[kind] = {k: f"{kind}/{k}".replace(".", "/") for k in part}
            for k, v in part.items():
                self.register_buffer(self._names[kind][k], v)
        if model.bank is not None:
            self.register_buffer("bank", model.bank.values)
            self.register_buffer("seen", model.bank.mask)
        self.register_buffer("mean", torch.tensor(model.pixels.mean))
        self.register_buffer("std", torch.tensor(model.pixels.std))
        if isinstance(model.network, ModuleNetwork):
            self.template = model.network.template  # what is traced must know the modules whose forward it calls

    @property
    def outputs(self) -> list[str]:
        return ["logits", "embedding", *(["cosine", "distance"] if self._model.bank is not None else [])]

    def _set(self, kind: str) -> dict[str, Tensor]:
        return {k: getattr(self, name) for k, name in self._names[kind].items()}

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        model = replace(
            self._model,
            weights=self._set("weights"),
            state={name: self._set(f"state/{name}") for name in self._model.state},
        )
        h, logits = model((images.to(self.mean.dtype) / 255 - self.mean) / self.std)
        if model.bank is None:
            return logits, h
        bank = replace(model.bank, values=self.bank, mask=self.seen)
        cosine, distance = likeness(h, bank, "cos"), -likeness(h, bank, "proto")
        return logits, h, cosine.masked_fill(~self.seen, -torch.inf), distance.masked_fill(~self.seen, torch.inf)


def write_onnx(path: Path, model: Model, images: Tensor, tolerance: float = TOLERANCE) -> float:
    """Writes the model as ONNX and returns the largest difference between its outputs, as onnxruntime computes them,
    and the model's own, on `images` (uint8 [N, H, W, C]), as a share of the output's largest value or of 1.

    If that is more than the tolerance, no file is written.
    """
    _needs()
    content = _graph(model)
    found = difference(content, model, images)
    if not found <= tolerance:
        raise UserError(
            f"{path}: not written; onnxruntime's outputs differ from fedsap's by {found:.1e}, more than {tolerance:.0e}"
        )
    part = path.with_name(f".{path.name}.part")
    with plainly(path):
        try:
            part.write_bytes(content)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    return found


def _needs() -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"--format onnx: needs {', '.join(missing)}; pip install 'fedsap[onnx]'")


def _graph(model: Model) -> bytes:
    graph = Graph(model).eval()
    example = torch.zeros(3, *model.pixels.shape, dtype=torch.uint8)
    with _quietly(), torch.no_grad():
        try:
            traced = torch.export.export(
                graph, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=False
            )
        except Exception as error:  # whatever a network's code runs into while it is traced
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            if "Constraints violated" in reason:
                reason = "its forward fixes the number of images; take x.shape[0] for len(x), x.flatten(1) for a view"
            raise UserError(
                f"--format onnx: {model.keys.name} with {model.method.title} cannot be traced ({reason})"
            ) from error
        program = torch.onnx.export(
            traced,
            (),
            dynamo=True,
            opset_version=OPSET,
            input_names=["images"],
            output_names=graph.outputs,
            verbose=False,
        )
        assert program is not None
        proto = program.model_proto
    for part in (proto.graph, *proto.graph.node, *proto.graph.value_info):
        part.ClearField("metadata_props")  # where in which source file each came from, on this machine
    for key, value in _about(model).items():
        proto.metadata_props.add(key=key, value=value)
    return bytes(proto.SerializeToString())


def _about(model: Model) -> Mapping[str, str]:
    return {
        "classes": json.dumps(model.classes),
        "own classes": json.dumps([model.classes[c] for c in model.owned]),
        "method": model.method.name,
        "network": model.keys.name,
        "fedsap": fedsap.__version__,
        "about": json.dumps(dict(model.about)),
    }


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what the exporter says of itself: that torchvision is not there, and a call of its own that torch
    deprecates."""
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
            yield
    finally:
        log.setLevel(before)


@torch.no_grad()
def difference(content: bytes, model: Model, images: Tensor) -> float:
    """The largest difference that `write_onnx` speaks of, with all images at once and with one alone."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    worst = 0.0
    for some in (images, images[:1]):
        h, logits = model(normalise(some, model.pixels.mean, model.pixels.std))
        expected = {"logits": logits, "embedding": h}
        if model.bank is not None:
            there = model.bank.mask
            expected["cosine"] = likeness(h, model.bank, "cos").masked_fill(~there, -torch.inf)
            expected["distance"] = -likeness(h, model.bank, "proto").masked_fill(~there, -torch.inf)
        got: dict[str, Any] = dict(zip(expected, session.run(list(expected), {"images": some.numpy()}), strict=True))
        worst = max(worst, *(_apart(got[name], value.numpy()) for name, value in expected.items()))
    return worst


def _apart(got: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    known = np.isfinite(expected)
    if got.shape != expected.shape or not np.array_equal(got[~known], expected[~known]):
        return float("inf")
    if not known.any():
        return 0.0
    apart = float(np.abs(got[known] - expected[known]).max()) / max(1.0, float(np.abs(expected[known]).max()))
    return apart if np.isfinite(apart) else float("inf")


def proof(model: Model, paths: Sequence[Path], root: Path | None) -> Tensor:
    """Images to compare on, uint8 [N, H, W, C]: of these files, or else test images of the client's classes."""
    if paths:
        read = [image(path, model.pixels) for path, _ in zip(files(paths), range(CHECKED), strict=False)]
        good = [one for one in read if not isinstance(one, str)]
        if not good:
            raise UserError(f"--check: no image that can be read in {', '.join(map(str, paths))}")
        return torch.from_numpy(np.stack(good))
    name, (height, _, channels) = str(model.about.get("data")), model.pixels.shape
    try:
        data = load(name, root, size=height, channels=1 if channels == 1 else 3)
    except UserError as error:
        raise UserError(f"{error}; or give images to compare on with --check") from None
    mine = np.flatnonzero(np.isin(data.test.labels, model.owned))
    if not len(mine):
        raise UserError("--check: there are no test images of the client's classes; takes images to compare on")
    return torch.from_numpy(data.test.images[mine[:: -(-len(mine) // CHECKED)]])
