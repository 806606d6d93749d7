"""The report of runs: tables and curves, from run folders alone."""

from collections.abc import Sequence
from pathlib import Path

from fedsap.collect import collect, find
from fedsap.errors import UserError
from fedsap.report.curves import curves
from fedsap.report.tables import markdown
from fedsap.runs import write


def write_report(folders: Sequence[Path], out: Path) -> list[Path]:
    """Writes report.md and its picture into `out`; the paths written."""
    runs = find(folders)
    entries = collect(runs)
    if not entries:
        raise UserError(f"{folders[0]}: holds no finished run yet; --resume finishes one")
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "curves.png"
    curves(runs, picture)
    page = out / "report.md"
    write(page, f"# fedsap\n\n{markdown(entries)}\n\n![Accuracy over rounds](curves.png)\n")
    return [page, picture]
