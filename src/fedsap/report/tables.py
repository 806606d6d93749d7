"""The tables of a report: what is in them, and their Markdown and LaTeX."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from fedsap.report.read import Floats, RunData
from fedsap.report.study import Score, Study, Variant, last, score, shares_prototypes

MEASURES = {
    "head": "head",
    "head_own": "head, own classes",
    "proto": "prototype L2",
    "proto_cos": "prototype cosine",
}
HEAD, PROTO = "Classifier-head inference", "Prototype-based inference (nearest centroid)"


@dataclass(frozen=True)
class Cell:
    """One entry: `value` is what it is sorted and compared by, in the unit of the text."""

    text: str
    value: float | None = None
    spread: float | None = None
    best: bool = False


@dataclass(frozen=True)
class Block:
    """Rows under a common heading, which may be empty."""

    title: str
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Table:
    """`heads` are pairs (group, column); the first `labels` columns are text."""

    name: str
    title: str
    caption: str
    heads: tuple[tuple[str, str], ...]
    blocks: tuple[Block, ...]
    labels: int = 1


def tables(study: Study, *, unfinished: bool = False) -> list[Table]:
    """All tables that the runs have numbers for. Runs that are not over count only if `unfinished`."""
    runs = _over if not unfinished else _all
    some = [main(study, runs), measures(study, runs), communication(study, runs), ablation(study, runs)]
    return [table for table in [*some, semi_supervised(study, runs), privacy(study, runs)] if table is not None]


Runs = Callable[[Variant], Sequence[RunData]]


def _over(variant: Variant) -> Sequence[RunData]:
    return variant.finished


def _all(variant: Variant) -> Sequence[RunData]:
    return variant.runs


def main(study: Study, runs: Runs) -> Table | None:
    """Methods by settings, a block for head and one for prototype inference; the best of column and block in bold."""
    settings = [s for s in study.settings if any(runs(v) for v in study.of(s.label))]
    blocks = []
    for measure, heading in (("head", HEAD), ("proto", PROTO)):
        rows = []
        for label in study.labels:
            found = [study.find(s.label, label) for s in settings]
            named = next(v for v in study.variants if v.label == label)
            if measure == "proto" and not shares_prototypes(named.method):
                continue
            cells = [percent(last(runs(v), measure) if v else score([])) for v in found]
            if any(cell.value is not None for cell in cells):
                rows.append((Cell(label), *cells))
        if rows:
            blocks.append(Block(heading, _bold(rows)))
    if not settings or not blocks:
        return None
    caption = (
        f"Top-1 accuracy (%) on the client's own classes in the last round, {_over_seeds(study, runs)}. "
        "Results are grouped by inference strategy. Bold: the best result within each column and group."
    )
    heads = (("", "Method"), *((s.dataset, s.short) for s in settings))
    return Table("main", "Accuracy (%)", caption, heads, tuple(blocks))


def measures(study: Study, runs: Runs) -> Table | None:
    """Every measure of every method, a block per setting."""
    heads = [("", "Method"), *(("Accuracy, last round (%)", say) for say in MEASURES.values())]
    heads += [("Best round (%)", "head"), ("Best round (%)", "prototype L2"), ("", "Silhouette"), ("", "Seconds")]
    blocks = []
    for setting in study.settings:
        rows = []
        for v in study.of(setting.label):
            if not runs(v):
                continue
            cells = [percent(last(runs(v), m)) for m in MEASURES]
            cells += [percent(score(max(_finite(run.mean[m])) for run in runs(v))) for m in ("head", "proto")]
            shape = last(runs(v), "silhouette")
            seconds = sum(float(run.seconds.sum()) for run in runs(v))
            cells += [_plain(shape, 3), Cell(f"{seconds:.1f}", seconds)]
            rows.append((Cell(v.label), *cells))
        if rows:
            blocks.append(Block(setting.label, tuple(rows)))
    caption = (
        f"All measures, {_over_seeds(study, runs)}. Prototype accuracy of a method whose server holds no prototypes is "
        "that of class means measured for the evaluation alone. Seconds: all seeds together."
    )
    return Table("measures", "All measures", caption, tuple(heads), tuple(blocks)) if blocks else None


def communication(study: Study, runs: Runs) -> Table | None:
    """Numbers that all clients of a federation send and receive in a round, in thousands."""
    settings = [s for s in study.settings if any(runs(v) for v in study.of(s.label))]
    blocks = []
    for way, heading in (("up", "Up: all clients to the server"), ("down", "Down: the server to all clients")):
        rows = []
        for label in study.labels:
            cells = []
            for setting in settings:
                v = study.find(setting.label, label)
                sent = score(run.per_round(way)[0] for run in runs(v)) if v else score([])
                cells.append(_thousands(sent))
            if any(cell.value is not None for cell in cells):
                rows.append((Cell(label), *cells))
        if rows:
            blocks.append(Block(heading, tuple(rows)))
    heads = (("", "Method"), *((s.dataset, s.short) for s in settings))
    caption = (
        "Communication per round in thousands of numbers, all clients together, counted from the payloads; "
        "mean over rounds and seeds, without round 1, in which nothing is sent down yet."
    )
    title = "Communication per round (thousands of numbers)"
    return Table("communication", title, caption, heads, tuple(blocks)) if blocks else None


def ablation(study: Study, runs: Runs) -> Table | None:
    """FedSAP with and without its two parts, all other options equal; FedProto where both are off."""
    blocks = []
    for setting in study.settings:
        mine = [v for v in study.of(setting.label) if runs(v)]
        for part in _ablations([v for v in mine if v.method == "fedsap"]):
            rows = [_ablated(*switches, v, runs) for switches, v in part.items()]
            if (False, False) not in part:
                rows = [_ablated(False, False, v, runs, v.label) for v in mine if v.method == "fedproto"][:1] + rows
            if len(rows) > 1:
                blocks.append(Block(setting.label, _bold(rows, labels=3)))
    heads = (
        ("", "Curriculum"),
        ("", "Proxy"),
        ("", "Runs of"),
        ("Accuracy (%)", "Prototype"),
        ("Accuracy (%)", "Head"),
    )
    caption = (
        "Ablation: the rising alignment weight (curriculum) and the proxy loss. Without a curriculum the weight is "
        f"constant or zero. Accuracy in the last round, {_over_seeds(study, runs)}."
    )
    return Table("ablation", "Ablation", caption, heads, tuple(blocks), labels=3) if blocks else None


def switches(options: dict[str, object]) -> tuple[bool, bool]:
    """Does this FedSAP have a rising alignment weight, and the proxy loss?

    >>> switches({"method.schedule_shape": "linear", "method.align_top": 0.7, "method.proxy": 0.0})
    (True, False)
    """
    rising = options["method.schedule_shape"] != "constant" and options["method.align_top"] != 0
    return rising, options["method.proxy"] != 0


def _ablations(variants: Sequence[Variant]) -> list[dict[tuple[bool, bool], Variant]]:
    """FedSAPs that are equal but for the two parts, by these; only where one of the parts was taken away."""
    parts = ("method.schedule_shape", "method.align_top", "method.proxy")
    groups: dict[str, dict[tuple[bool, bool], Variant]] = {}
    for v in variants:
        if not all(name in v.options for name in parts):
            continue
        rest = repr(sorted((k, repr(x)) for k, x in v.options.items() if k not in parts))
        group = groups.setdefault(rest, {})
        here = group.get(switches(v.options))
        if here is None or v.options["method.schedule_shape"] == "linear" != here.options["method.schedule_shape"]:
            group[switches(v.options)] = v
    return [{k: group[k] for k in sorted(group)} for group in groups.values() if len(group) > 1]


def _ablated(curriculum: bool, proxy: bool, v: Variant, runs: Runs, label: str | None = None) -> tuple[Cell, ...]:
    marks = (Cell("yes" if on else "no") for on in (curriculum, proxy))
    return (*marks, Cell(label or "FedSAP"), *(percent(last(runs(v), m)) for m in ("proto", "head")))


def semi_supervised(study: Study, runs: Runs) -> Table | None:
    """Before and after the second phase, of runs whose rounds name two phases."""
    blocks = []
    for setting in study.settings:
        rows = []
        for v in study.of(setting.label):
            two = [run for run in runs(v) if len(run.phases) > 1]
            if not two:
                continue
            cells: list[Cell] = []
            for after in (False, True):
                places = [_place(run, after) for run in two]
                shape = score(float(run.silhouette[i]) for run, i in zip(two, places, strict=True))
                right = score(float(run.mean["proto"][i]) for run, i in zip(two, places, strict=True))
                cells += [_plain(shape, 2), percent(right)]
            for one, other in ((0, 2), (1, 3)):
                a, b = cells[one].value, cells[other].value
                if a is not None and b is not None and a != b:
                    better = other if b > a else one
                    cells[better] = replace(cells[better], best=True)
            rows.append((Cell(v.label), *cells))
        if rows:
            blocks.append(Block(setting.label, tuple(rows)))
    heads = (("", "Method"), *((g, c) for g in ("Supervised", "+ refinement") for c in ("Silhouette", "Accuracy (%)")))
    caption = (
        "The second phase: silhouette and prototype accuracy at the end of the supervised phase and of the run, "
        f"{_over_seeds(study, runs)}."
    )
    return Table("semi-supervised", "Semi-supervised refinement", caption, heads, tuple(blocks)) if blocks else None


def privacy(study: Study, runs: Runs) -> Table | None:
    """What runs with noise on their messages have spent, and what that is worth."""
    blocks = []
    for setting in study.settings:
        rows = []
        for v in study.of(setting.label):
            noisy = [run for run in runs(v) if run.privacy]
            if not noisy:
                continue
            keys = noisy[0].config["privacy"]
            name = "epsilon" if "epsilon" in noisy[0].privacy else "epsilon_if_fixed"
            most = max(max(run.privacy[name]) for run in noisy)
            number = max(max(run.privacy["releases"]) for run in noisy)
            worth = "all images of a client" if name == "epsilon" else "nothing: the network has seen the images"
            worth += ", from whoever does not know the seed" if name == "epsilon" and keys["source"] == "seed" else ""
            cells = [Cell(f"{keys['noise']:g}", keys["noise"]), Cell(f"{keys['clip']:g}", keys["clip"])]
            cells += [Cell(str(number), number), Cell(f"{keys['delta']:g}", keys["delta"]), Cell(f"{most:.2f}", most)]
            rows.append((Cell(v.label), Cell(worth), *cells))
        if rows:
            blocks.append(Block(setting.label, tuple(rows)))
    heads = [("", name) for name in ("Method", "Guarantee for", "Noise", "Clip", "Messages", "Delta", "Epsilon")]
    caption = (
        "Privacy: noise in units of the sensitivity, the length to which vectors are clipped, messages of the client "
        "that has sent most, and its epsilon in one run. Several runs on the same images add up."
    )
    return Table("privacy", "Privacy", caption, tuple(heads), tuple(blocks), labels=2) if blocks else None


def _place(run: RunData, after: bool) -> int:
    """Which evaluation is the last of the run, or of its first phase."""
    return len(run.judged) - 1 if after else max(int((run.judged < run.phases[1][1]).sum()) - 1, 0)


def _finite(values: Floats) -> list[float]:
    return [v for v in values.tolist() if v == v] or [float("nan")]


def percent(found: Score) -> Cell:
    """A share of 1 in per cent.

    >>> percent(score([0.5, 0.6])).text, percent(score([0.5])).text, percent(score([])).text
    ('55.00 ± 7.07', '50.00', '–')
    """
    if found.mean is None:
        return Cell("–")
    spread = None if found.std is None else 100 * found.std
    return Cell(f"{100 * found.mean:.2f}" + ("" if spread is None else f" ± {spread:.2f}"), 100 * found.mean, spread)


def _plain(found: Score, digits: int) -> Cell:
    if found.mean is None:
        return Cell("–")
    spread = "" if found.std is None else f" ± {found.std:.{digits}f}"
    return Cell(f"{found.mean:.{digits}f}{spread}", found.mean, found.std)


def _thousands(found: Score) -> Cell:
    if found.mean is None:
        return Cell("–")
    value = found.mean / 1000
    return Cell(f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value else "0", value)


def _bold(rows: Sequence[tuple[Cell, ...]], labels: int = 1) -> tuple[tuple[Cell, ...], ...]:
    """The largest of each column marked, with all that read the same."""
    columns = list(zip(*rows, strict=True))
    marked = list(columns[:labels])
    for column in columns[labels:]:
        best = max((cell.value for cell in column if cell.value is not None), default=None)
        said = None if best is None else f"{best:.2f}"
        alone = sum(cell.value is not None for cell in column) < 2
        marked.append(
            tuple(replace(c, best=not alone and c.value is not None and f"{c.value:.2f}" == said) for c in column)
        )
    return tuple(zip(*marked, strict=True))


def _over_seeds(study: Study, runs: Runs) -> str:
    """How many seeds the numbers are from; a spread is given where there are at least two."""
    counts = sorted({len(runs(v)) for v in study.variants if runs(v)})
    if counts in ([1], []):
        return "one seed"
    return f"mean ± standard deviation over {counts[0] if len(counts) == 1 else f'{counts[0]} to {counts[-1]}'} seeds"


def markdown(table: Table) -> str:
    """A table for a Markdown page."""
    names = [f"{group}, {name}" if group else name for group, name in table.heads]
    lines = ["| " + " | ".join(names) + " |"]
    lines.append("| " + " | ".join(["---"] * table.labels + ["---:"] * (len(names) - table.labels)) + " |")
    for block in table.blocks:
        if block.title:
            lines.append(f"| *{block.title}* |" + " |" * (len(names) - 1))
        for row in block.rows:
            cells = [f"**{cell.text}**" if cell.best else cell.text for cell in row]
            lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return f"## {table.title}\n\n{chr(10).join(lines)}\n\n{table.caption}\n"


_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "±": r"$\pm$"}


def escape(text: str) -> str:
    r"""Text for LaTeX.

    >>> print(escape("align_start=20, 50 %"))
    align\_start=20, 50 \%
    """
    return "".join(_SPECIAL.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def _latex_cell(cell: Cell, label: bool) -> str:
    marks = {"no": "--"}
    if label or cell.value is None:
        return marks.get(cell.text, escape(cell.text))
    number = cell.text.replace(" ± ", r"{\pm}").replace(",", "{,}")
    return rf"$\mathbf{{{number}}}$" if cell.best else f"${number}$"


def latex(table: Table) -> str:
    """A table environment; needs the package booktabs and, with more than seven columns, graphicx."""
    width = len(table.heads)
    groups = [(name, len(list(same))) for name, same in groupby(group for group, _ in table.heads)]
    lines = [r"\begin{table}[t]", r"\centering", r"\small", r"\setlength{\tabcolsep}{4pt}"]
    if width > 7:
        lines.append(r"\resizebox{\textwidth}{!}{%")
    lines += [rf"\begin{{tabular}}{{{'l' * table.labels}{'c' * (width - table.labels)}}}", r"\toprule"]
    if any(name for name, _ in groups):
        lines.append(
            " & ".join(
                rf"\multicolumn{{{size}}}{{c}}{{\textbf{{{escape(name)}}}}}" if name else " & ".join([""] * size)
                for name, size in groups
            )
            + r" \\"
        )
        start, rules = 1, []
        for name, size in groups:
            if name:
                rules.append(rf"\cmidrule(lr){{{start}-{start + size - 1}}}")
            start += size
        lines.append(" ".join(rules))
    lines.append(" & ".join(_head(name) for _, name in table.heads) + r" \\")
    for block in table.blocks:
        lines.append(r"\midrule")
        if block.title:
            lines += [rf"\multicolumn{{{width}}}{{c}}{{\textbf{{{escape(block.title)}}}}} \\", r"\midrule"]
        lines += [
            " & ".join(_latex_cell(cell, i < table.labels) for i, cell in enumerate(row)) + r" \\" for row in block.rows
        ]
    lines += [r"\bottomrule", r"\end{tabular}" + ("%\n}" if width > 7 else "")]
    lines += [rf"\caption{{{escape(table.caption)}}}", rf"\label{{tab:{table.name}}}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _head(name: str) -> str:
    before, equals, after = name.partition("=")
    plain = equals and len(before) == 1 and "," not in name
    return f"${before}{{=}}{escape(after)}$" if plain else escape(name)


def document(found: Sequence[Table]) -> str:
    """A document of all tables that compiles as it is."""
    packages = "".join(rf"\usepackage{{{name}}}" + "\n" for name in ("booktabs", "graphicx"))
    body = "\n".join(latex(table) for table in found)
    start = f"\\documentclass{{article}}\n{packages}\\begin{{document}}\n"
    return f"{start}{body}\\end{{document}}\n"
