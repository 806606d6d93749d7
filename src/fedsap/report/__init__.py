"""The report of runs: tables, figures and a page, from run folders alone."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from fedsap.errors import UserError
from fedsap.files import write

FORMATS = ("html", "md", "tex")


def write_report(
    folders: Sequence[Path],
    out: Path,
    formats: Sequence[str] = FORMATS,
    complain: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Writes the report of all runs at or below `folders` into `out`; the main file of each format.

    html   report.html
    md     report.md and figures/*.png, *.pdf
    tex    report.tex, tables/*.tex and figures/*.png, *.pdf

    What cannot be read is told to `complain`, a line each, and left out.
    """
    from fedsap.report import against, html, tables
    from fedsap.report.content import content
    from fedsap.report.layout import chosen, layouts, shortened
    from fedsap.report.read import find, load
    from fedsap.report.study import arrange

    for name in formats:
        if name not in FORMATS:
            raise UserError(f"--format: got '{name}', takes {', '.join(FORMATS)}")
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        complain(line)

    runs = load(find(folders, note), note)
    for run in runs:
        if not run.over:
            note(f"{run.folder}: not over (round {run.rounds[-1]} of {run.planned}); in the curves, not in the tables")
    if not runs:
        raise UserError(
            f"{folders[0]}: holds no run with an evaluated round; takes a folder that fedsap run has written"
        )
    study = arrange(runs)
    places = chosen(study)
    if said := shortened(study, places):
        note(said)
    planes = {(place.setting, place.label): layouts(place, note) for place in places}
    found = [*tables.tables(study), *against.of_runs(study.runs)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        drawn = []
        if {"md", "tex"} & set(formats):
            from fedsap.report import figures

            drawn = figures.draw(study, planes, out / "figures")
        written = []
        if "html" in formats:
            public = [_without_folders(line, folders) for line in notes]
            written.append(
                _put(out / "report.html", html.page(content(study, planes, public), html.tables_html(found)))
            )
        if "md" in formats:
            body = "\n".join(tables.markdown(table) for table in found)
            pictures = "\n\n".join(f"![{caption}](figures/{name}.png)\n\n{caption}" for name, caption in drawn)
            written.append(_put(out / "report.md", f"# Results\n\n{body}\n## Figures\n\n{pictures}\n"))
        if "tex" in formats:
            (out / "tables").mkdir(exist_ok=True)
            for table in found:
                _put(out / "tables" / f"{table.name}.tex", tables.latex(table))
            written.append(_put(out / "report.tex", tables.document(found)))
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}; choose another --out") from None
    return written


def _without_folders(line: str, folders: Sequence[Path]) -> str:
    """A page goes to others: it names a run's folder, not where it lies."""
    for folder in folders:
        line = line.replace(f"{folder}{os.sep}", "").replace(str(folder), folder.name or "runs")
    return line


def _put(path: Path, text: str) -> Path:
    write(path, text)
    return path
