"""Predictions as CSV or JSON, written as they come."""

import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import IO, get_args

from fedsap.errors import UserError
from fedsap.predict import Among, By, Failure, allowed, predict
from fedsap.runs import plainly
from fedsap.saved import Model

COLUMNS = ("path", "class", "score", "second", "margin")


def answer(
    model: Model,
    images: Sequence[Path],
    by: str,
    among: str,
    out: Path | None,
    as_json: bool,
    complain: Callable[[str], None],
) -> int:
    """Writes what the model sees in the images; how many of them could not be read.

    CSV to `out`, if given; with `as_json` one JSON object to standard output, without either CSV there.
    """
    way, which = _by(by), _among(among)
    allowed(model, way, which)  # before anything is written
    failures: list[Failure] = []
    with ExitStack() as open_:
        table = open_.enter_context(_file(out)) if out else None if as_json else sys.stdout
        rows = None if table is None else csv.writer(table, lineterminator="\n")
        if rows:
            rows.writerow(COLUMNS)
        if as_json:
            head = {"by": by, "classes": among, "model": dict(model.about)}
            sys.stdout.write(json.dumps(head)[:-1] + ', "images": [')
        comma = ""
        for one in predict(model, images, way, which):
            if isinstance(one, Failure):
                failures.append(one)
                complain(f"{one.path}: {one.reason}")
                continue
            values = astuple(one)
            if rows:
                rows.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in values])
            if as_json:
                sys.stdout.write(comma + json.dumps(dict(zip(COLUMNS, values, strict=True))))
                comma = ", "
        if as_json:
            sys.stdout.write(f'], "failed": {json.dumps([vars(one) for one in failures])}}}\n')
    if out and not as_json:
        print(f"predictions: {out}")
    return len(failures)


def _by(value: str) -> By:
    found: dict[str, By] = {v: v for v in get_args(By)}
    if value not in found:
        raise UserError(f"--by: got '{value}', takes head, proto or cos")
    return found[value]


def _among(value: str) -> Among:
    found: dict[str, Among] = {v: v for v in get_args(Among)}
    if value not in found:
        raise UserError(f"--classes: got '{value}', takes own or all")
    return found[value]


@contextmanager
def _file(path: Path) -> Iterator[IO[str]]:
    """A file that takes the place of the old one when all is written."""
    part = path.with_name(f".{path.name}.part")
    with plainly(path):
        try:
            with part.open("w", encoding="utf-8", newline="") as file:
                yield file
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
