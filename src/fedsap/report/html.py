"""The page: one file that needs no network."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedsap.report.content import without_explorer
from fedsap.report.tables import Table

LIMIT = 4_900_000  # bytes of a page, so that it goes by mail


@cache
def _environment() -> Environment:
    loader = PackageLoader("fedsap.report", "page")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.globals["spans"] = spans
    return made


@cache
def _part(name: str) -> str:
    return (resources.files("fedsap.report") / "page" / name).read_text(encoding="utf-8")


def spans(names: Sequence[str]) -> list[tuple[str, int]]:
    """Neighbours of the same name as one.

    >>> spans(["", "a", "a", "b"])
    [('', 1), ('a', 2), ('b', 1)]
    """
    return [(name, len(list(same))) for name, same in groupby(names)]


def tables_html(tables: Sequence[Table]) -> str:
    """The tables as HTML."""
    return _environment().get_template("tables.html").render(tables=tables)


def page(data: Mapping[str, Any], tables: str, title: str = "Results") -> str:
    """The page of `content.content` and `tables_html`, under LIMIT: embeddings are left out from the end if need be."""
    while True:
        text = _render(data, tables, title)
        if len(text.encode()) <= LIMIT or not data["explorer"]:
            return text
        last = data["explorer"][-1]
        shorter = without_explorer(data)
        note = f"Embeddings of {last['label']}, {last['setting']}: left out to keep the page small"
        data = {**shorter, "notes": [*data["notes"], note]}


def _render(data: Mapping[str, Any], tables: str, title: str) -> str:
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=title,
            data=data,
            tables=tables,
            json=embedded(data),
            css=_part("page.css"),
            plotly=_part("plotly-basic.min.js"),
            script=_part("page.js"),
        )
    )


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that is safe inside a script element.

    >>> print(embedded({"a": "</script>"}))
    {"a":"\\u003c/script>"}
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
