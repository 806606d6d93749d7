"""Everything that the page shows, as plain data for JSON."""

import base64
import hashlib
import io
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import fedsap
from fedsap.config import resolve
from fedsap.errors import UserError
from fedsap.evaluate import MEASURES
from fedsap.methods import METHODS
from fedsap.report.colours import CLASSES, PALETTE
from fedsap.report.layout import Layouts
from fedsap.report.read import RunData
from fedsap.report.study import (
    POOL,
    SHARES,
    Study,
    Sweep,
    Variant,
    last,
    over_rounds,
    shares_prototypes,
    sweeps,
    title,
)  # fmt: skip
from fedsap.report.tables import MEASURES as NAMES
from fedsap.runs import flat
from fedsap.snapshots import load_images

Json = dict[str, Any]
ROWS = 20_000  # of per-client figures on a page
COLUMNS = 25  # thumbnails in a row of a sheet
SWEEPS = {
    "partition.shots": ("Accuracy against k", "k (samples per class and client)", ("head", "proto")),
    "method.schedule_shape": ("Schedule shapes", "shape of the alignment weight", ("head", "proto")),
    "method.align_start": ("Start round", "start round of the ramp", ("head", "proto")),
    "method.proxy_scale": ("Proxy scale", "proxy scale s", ("head", "proto")),
}


def content(study: Study, layouts: Layouts, notes: Sequence[str]) -> Json:
    """The page's data. Accuracies are in per cent; None where nothing was measured."""
    measures = {**NAMES, "silhouette": "silhouette"}
    terms = list(dict.fromkeys(term for run in study.runs for term in run.loss))
    shown: Json = {
        "head": "Head accuracy",
        "proto": "Prototype accuracy (L2)",
        "proto_cos": "Prototype accuracy (cosine)",
    }
    shown |= {"head_own": "Head accuracy, own classes", "silhouette": "Silhouette"}
    shown |= {f"loss:{term}": f"Loss term: {term}" for term in terms}
    shown |= {f"noted:{name}": name.capitalize() for name in dict.fromkeys(n for r in study.runs for n in r.noted)}
    said = dict.fromkeys(name for run in study.runs for name in run.unlabelled)
    shown |= {f"unlabelled:{name}": POOL.get(name, name) for name in said}
    sheets: dict[str, Json] = {}
    explorer = [_explored(study, s, label, rounds, sheets) for (s, label), rounds in layouts.items() if rounds]
    return {
        "fedsap": fedsap.__version__,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "palette": PALETTE,
        "classes": CLASSES,
        "settings": [s.label for s in study.settings],
        "methods": [_method(study, label) for label in study.labels],
        "measures": shown,
        "names": measures,
        "variants": [_variant(v, list(shown)) for v in study.variants],
        "clients": _clients(study),
        "sweeps": [_sweep(key, one) for key in SWEEPS for one in sweeps(study, key)],
        "explorer": explorer,
        "sheets": sheets,
        "runs": len(study.runs),
        "running": sum(not run.over for run in study.runs),
        "notes": list(notes),
    }


def _method(study: Study, label: str) -> Json:
    name = next(v.method for v in study.variants if v.label == label)
    about = METHODS.get(name)
    return {
        "label": label,
        "name": name,
        "title": title(name),
        "paper": about.paper if about else "",
        "sends": about.sends if about else "",
        "bank": shares_prototypes(name),
    }


def _variant(v: Variant, measures: Sequence[str]) -> Json:
    curves: Json = {}
    for measure in measures:
        curve = over_rounds(v.runs, measure)
        scale = 100 if measure in (*MEASURES, *(f"unlabelled:{name}" for name in SHARES)) else 1
        if np.isnan(curve.mean).all() if len(curve.mean) else True:
            continue
        curves[measure] = {"x": curve.rounds, "y": _round(scale * curve.mean), "s": _round(scale * curve.std)}
    run = v.runs[0]
    return {
        "setting": v.setting,
        "label": v.label,
        "seeds": v.seeds,
        "over": all(run.over for run in v.runs),
        "kept": any(run.snapshots for run in v.runs),
        "round": min(int(run.rounds[-1]) for run in v.runs),
        "planned": run.planned,
        "curves": curves,
        "last": {m: _pair(v, m) for m in (*MEASURES, "silhouette")},
        "up": sum(run.per_round("up")[0] for run in v.runs) / len(v.runs),
        "down": sum(run.per_round("down")[0] for run in v.runs) / len(v.runs),
        "seconds": round(float(sum(run.seconds.sum() for run in v.runs)), 1),
        "marks": [[name, t] for name, t in run.phases[1:]],
        "command": command(run, v.seeds),
        "config": {k: x for k, x in run.config.items() if k != "seed"},
        "environment": _environment(run),
    }


def _pair(v: Variant, measure: str) -> list[float | None]:
    found = last(v.runs, measure)
    scale = 1 if measure == "silhouette" else 100
    return [None if x is None else round(scale * x, 4) for x in (found.mean, found.std)]


def _environment(run: RunData) -> Json:
    """Versions and device, without what names the machine's folders."""
    return {k: v for k, v in run.environment.items() if k not in ("command", "classes")}


def command(run: RunData, seeds: Sequence[int]) -> str:
    """The command that makes these runs anew: the method, the seeds and every key that is not at its default."""
    config, made = run.config, str(run.environment.get("method", ""))
    method = made if made and not made.startswith("fedsap.") else run.method  # one's own has a place, not only a name
    parts = ["fedsap", "run", "--method", method, *(x for seed in seeds for x in ("--seed", str(seed)))]
    user: Json = {"data": {"name": config["data"]["name"]}, "preset": config.get("preset", "paper")}
    try:
        plain = flat(resolve(user, [run.method], [run.seed])[0].model_dump(mode="json"))
    except UserError:
        plain = {}
    for key, value in flat(config).items():
        if key in ("seed", "method.name") or (key in plain and plain[key] == value):
            continue
        if value is None:
            continue
        parts += ["--set", f"{key}={_toml(value)}"]
    if plain and config["data"]["name"] != "digits":
        parts += [] if "data.name" not in plain else ["--set", f"data.name={config['data']['name']}"]
    if config.get("preset", "paper") != "paper":
        parts += ["--set", f"preset={config['preset']}"]
    return shlex.join(parts)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _clients(study: Study) -> list[Json]:
    """Per client of each run: classes, samples, accuracies; as far as ROWS go."""
    found: list[Json] = []
    left = ROWS
    for setting in study.settings:
        for v in study.of(setting.label):
            for run in v.runs:
                owned, shots = run.partition["classes"], run.partition["shots"]
                left -= len(owned)
                if left < 0:
                    return found
                names = run.classes
                found.append(
                    {
                        "setting": setting.label,
                        "label": v.label,
                        "seed": run.seed,
                        "owned": [", ".join(names[c] for c in own) for own in owned],
                        "samples": [int(sum(some)) for some in shots],
                        "accuracy": {m: _round(100 * run.accuracy[m][-1]) for m in MEASURES},
                    }
                )
    return found


def _sweep(key: str, one: Sweep) -> Json:
    name, axis, measures = SWEEPS[key]
    points: Json = {}
    for m in measures:
        scores = [last(runs, m) for _, runs in one.points]
        points[m] = {
            "y": [None if s.mean is None else round(100 * s.mean, 4) for s in scores],
            "s": [round(100 * (s.std or 0.0), 4) for s in scores],
        }
    return {
        "key": key,
        "title": name,
        "axis": axis,
        "setting": one.setting,
        "label": one.label,
        "x": [value for value, _ in one.points],
        "points": points,
    }


def _explored(study: Study, setting: str, label: str, rounds: Sequence[Any], sheets: dict[str, Json]) -> Json:
    v = study.find(setting, label)
    assert v is not None
    run = next(run for run in v.runs if run.snapshots)
    first = rounds[0]
    return {
        "setting": setting,
        "label": label,
        "seed": run.seed,
        "names": run.classes,
        "labels": first.labels.tolist(),
        "clients": first.clients.tolist(),
        "sheet": _sheet(run, first.rows, sheets),
        "rounds": [
            {
                "t": layout.round,
                "x": _round(layout.points[:, 0], 3),
                "y": _round(layout.points[:, 1], 3),
                "stars": [
                    [round(x, 3), round(y, 3), int(c)]
                    for (x, y), c in zip(layout.stars.tolist(), layout.classes, strict=True)
                ],
            }
            for layout in rounds
        ],
    }


def _sheet(run: RunData, rows: NDArray[np.int64], sheets: dict[str, Json]) -> str | None:
    """The thumbnails of these rows as one picture, which methods share; its name."""
    try:
        images = load_images(run.folder)
    except UserError:
        return None
    if rows.max(initial=0) >= len(images):
        return None
    some = images[rows]
    name = hashlib.sha256(some.tobytes()).hexdigest()[:12]
    if name not in sheets:
        n, height, width, channels = some.shape
        down = -(-n // COLUMNS)
        sheet = np.zeros((down * height, COLUMNS * width, channels), np.uint8)
        for i, one in enumerate(some):
            r, c = divmod(i, COLUMNS)
            sheet[r * height : (r + 1) * height, c * width : (c + 1) * width] = one
        picture = Image.fromarray(sheet[..., 0] if channels == 1 else sheet[..., :3])
        sheets[name] = {"uri": _uri(picture), "width": width, "height": height, "columns": COLUMNS, "rows": down}
    return name


def _uri(picture: Image.Image) -> str:
    """The smaller of PNG and, for larger pictures, WebP."""
    png = io.BytesIO()
    picture.save(png, "PNG", optimize=True)
    kind, data = "png", png.getvalue()
    if len(data) > 60_000:
        webp = io.BytesIO()
        picture.save(webp, "WEBP", quality=75)
        kind, data = "webp", webp.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _round(values: Any, digits: int = 4) -> list[float | None]:
    return [round(v, digits) if math.isfinite(v) else None for v in np.asarray(values, float).tolist()]


def without_explorer(data: Mapping[str, Any]) -> Json:
    """The same with one method less to explore, and the pictures that none of the others needs."""
    explorer = list(data["explorer"])[:-1]
    used = {one["sheet"] for one in explorer}
    return {**data, "explorer": explorer, "sheets": {k: v for k, v in data["sheets"].items() if k in used}}
