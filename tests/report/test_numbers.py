"""The numbers of every table and figure are those of the run folders."""

import json
import re
import shlex
import shutil
import statistics
import subprocess

import numpy as np
import pytest
from matplotlib.colors import to_hex

from fedsap.collect import collect
from fedsap.config import assignments, resolve
from fedsap.report import figures, look, tables
from fedsap.report.content import command, content
from fedsap.report.layout import chosen, layouts, shortened
from fedsap.report.read import find, load
from fedsap.report.study import arrange, over_rounds, sweeps
from fedsap.runs import decisive


def study_of(folder):
    return arrange(load(find([folder], pytest.fail), pytest.fail))


@pytest.fixture(scope="module")
def study(trained):
    return study_of(trained)


@pytest.fixture(scope="module")
def varied(studies):
    return study_of(studies)


def cells(table, column):
    """(block, label) -> cell"""
    at = [name for _, name in table.heads].index(column)
    return {(block.title, row[0].text): row[at] for block in table.blocks for row in block.rows}


def table_of(study, name):
    return next(t for t in tables.tables(study) if t.name == name)


def test_main_table_is_the_results(study, trained, results):
    found, read = cells(table_of(study, "main"), "n=3"), results(trained)
    for block, measure in ((tables.HEAD, "head"), (tables.PROTO, "proto")):
        for label, method in (("FedSAP", "fedsap"), ("FedProto", "fedproto"), ("FedAvg", "fedavg")):
            if (measure, method) == ("proto", "fedavg"):
                assert (block, label) not in found  # its server holds no prototypes
                continue
            means = [100 * read[method, seed]["accuracy"][measure]["mean"] for seed in (1, 2)]
            cell = found[block, label]
            assert cell.value == pytest.approx(statistics.fmean(means), abs=1e-9)
            assert cell.spread == pytest.approx(statistics.stdev(means), abs=1e-9)
            assert cell.text == f"{statistics.fmean(means):.2f} ± {statistics.stdev(means):.2f}"


def test_the_best_of_a_column_and_group_is_bold(study):
    for block in table_of(study, "main").blocks:
        values = {row[0].text: row[1].value for row in block.rows}
        bold = {row[0].text for row in block.rows if row[1].best}
        assert bold == {label for label, v in values.items() if f"{v:.2f}" == f"{max(values.values()):.2f}"}


def test_measures_are_those_that_the_run_command_prints(study, trained):
    entries = {e["method"]: e for e in collect(find([trained], pytest.fail))}
    found = table_of(study, "measures")
    for label, method in (("FedSAP", "fedsap"), ("FedProto", "fedproto"), ("FedAvg", "fedavg")):
        row = next(row for row in found.blocks[0].rows if row[0].text == label)
        entry = entries[method]
        expected = [100 * entry[f"{m}_acc"]["mean"] for m in tables.MEASURES]
        expected += [100 * entry[f"{m}_acc"]["best"] for m in ("head", "proto")] + [
            entry["silhouette"],
            entry["seconds"],
        ]
        assert [cell.value for cell in row[1:]] == pytest.approx(expected, abs=2e-3)


def test_communication_is_the_results(study, trained, results):
    read = results(trained)
    for block, way in zip(table_of(study, "communication").blocks, ("up", "down"), strict=True):
        for row in block.rows:
            method = {"FedSAP": "fedsap", "FedProto": "fedproto", "FedAvg": "fedavg"}[row[0].text]
            sent = statistics.fmean(read[method, seed]["comm"][way]["numbers"] for seed in (1, 2))
            assert row[1].value == pytest.approx(sent / 1000, abs=1e-4)


def mean_last(varied, folder, measure, at=-1):
    runs = [run for run in varied.runs if run.folder.parent.name == folder and run.method == "fedsap"]
    lines = [json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[at]) for run in runs]
    return [100 * statistics.fmean(line["accuracy"][measure]) for line in lines]


def test_ablation_is_the_runs(varied):
    rows = [[c.text for c in row[:3]] + [row[3].value] for b in table_of(varied, "ablation").blocks for row in b.rows]
    expected = {("yes", "yes"): "plain", ("no", "yes"): "constant", ("yes", "no"): "no-proxy"}
    assert {tuple(row[:2]) for row in rows} == {*expected, ("no", "no")}
    for curriculum, proxy, label, value in rows:
        if (curriculum, proxy) in expected:
            assert value == pytest.approx(statistics.fmean(mean_last(varied, expected[curriculum, proxy], "proto")))
        else:
            assert label == "FedProto"


def test_second_phase_is_the_runs(varied):
    (row,) = table_of(varied, "semi-supervised").blocks[0].rows
    before, after = mean_last(varied, "k25", "proto", at=9), mean_last(varied, "k25", "proto")
    assert (row[2].value, row[4].value) == pytest.approx((statistics.fmean(before), statistics.fmean(after)))
    assert row[4].best


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("partition.shots", [5, 25, 100]),
        ("method.schedule_shape", ["constant", "cosine", "linear"]),
        ("method.align_start", [1, 4]),
        ("method.proxy_scale", [8.0, 32.0]),
    ],
)
def test_what_was_varied_is_found(varied, key, values):
    found = next(s for s in sweeps(varied, key) if s.label.startswith("FedSAP"))
    assert [value for value, _ in found.points] == values
    assert all(len(runs) == 2 for _, runs in found.points)


def drawn(figure):
    """x and y of every line, by panel title."""
    return {ax.get_title("left"): [line.get_xydata() for line in ax.lines] for ax in figure.axes}


def test_curves_are_the_metrics(study, trained):
    ((_, lines),) = drawn(figures.convergence(study, "head", [s.label for s in study.settings])).items()
    for label, xy in zip(study.labels, lines, strict=True):
        method = {"FedSAP": "fedsap", "FedProto": "fedproto", "FedAvg": "fedavg"}[label]
        rows = [
            [json.loads(line) for line in (trained / f"{method}-{seed}" / "metrics.jsonl").read_text().splitlines()]
            for seed in (1, 2)
        ]
        expected = [
            (t, 100 * statistics.fmean(statistics.fmean(r[t - 1]["accuracy"]["head"]) for r in rows)) for t in (2, 4)
        ]
        np.testing.assert_allclose(xy, expected)


def test_silhouette_figure_is_the_metrics_and_marks_the_phase(varied):
    setting = next(s.label for s in varied.settings if "k=25" in s.label)
    figure = figures.convergence(varied, "silhouette", [setting])
    assert "refinement" in [text.get_text() for ax in figure.axes for text in ax.texts]
    v = varied.find(setting, next(v.label for v in varied.of(setting) if v.method == "fedsap"))
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), over_rounds(v.runs, "silhouette").mean)


def test_clients_figure_is_the_results(study, trained, results):
    figure, read = figures.per_client(study, [s.label for s in study.settings]), results(trained)
    dots = [np.sort(c.get_offsets()[:, 1]) for c in figure.axes[0].collections]
    expected = [np.sort([100 * v for s in (1, 2) for v in read[m, s]["accuracy"]["head"]["per_client"]])
                for m in ("fedsap", "fedproto", "fedavg")]  # fmt: skip
    for one, other in zip(dots, expected, strict=True):
        np.testing.assert_allclose(one, other)


def test_partition_map_is_the_partition(study, trained):
    figure = figures.partitions(study, [s.label for s in study.settings])
    counts = np.nan_to_num(np.asarray(figure.axes[0].images[0].get_array(), float))
    part = json.loads((trained / "fedsap-1" / "partition.json").read_text())
    assert counts.sum() == sum(map(sum, part["shots"]))
    for client, (own, shots) in enumerate(zip(part["classes"], part["shots"], strict=True)):
        assert counts[client, own].tolist() == shots


def test_sweeps_and_bars_are_the_runs(varied):
    found = next(s for s in sweeps(varied, "partition.shots") if s.label == "FedSAP")
    line = figures.swept(varied, [found], ("head",), "k").axes[0].lines[0].get_xydata()
    expected = [
        (k, statistics.fmean(mean_last(varied, name, "head"))) for k, name in ((5, "k5"), (25, "k25"), (100, "plain"))
    ]
    np.testing.assert_allclose(line, expected)
    points = figures.schedule_shapes(sweeps(varied, "method.schedule_shape")[:1]).axes[1].containers
    heights = [statistics.fmean(mean_last(varied, name, "proto")) for name in ("constant", "cosine", "plain")]
    assert [point[0].get_ydata().item() for point in points] == pytest.approx(heights)


def test_tsne_figures_show_the_snapshots(study):
    place = chosen(study)[0]
    setting, label = place.setting, place.label
    planes = layouts(place, pytest.fail)
    assert [p.round for p in planes] == [2, 4]
    assert set(planes[0].labels.tolist()) <= set(range(10))
    stars = planes[-1]
    figure = figures.side_by_side(study, setting, {label: planes})
    placed = [c for c in figure.axes[0].collections if len(c.get_offsets()) == 1 and c.get_sizes()[0] == 130]
    np.testing.assert_allclose(np.sort([c.get_offsets()[0] for c in placed], 0), np.sort(stars.stars, 0))
    assert to_hex(placed[0].get_facecolor()[0]) == look.of_class(int(stars.classes[0]))[0].lower()


@pytest.mark.parametrize(
    ("most", "expected"),
    [(2, [(4,), (4,)]), (3, [(4,), (4,), (4,)]), (4, [(2, 4), (4,), (4,)]), (6, [(2, 4)] * 3)],
)
def test_every_methods_last_round_is_laid_out_before_earlier_ones(study, most, expected):
    places = chosen(study, most)
    assert [place.rounds for place in places] == expected
    left_out = shortened(study, places)
    assert left_out == "" if most == 6 else left_out.startswith(f"embeddings: {most} of 6 kept rounds are laid out")


def test_markdown_and_latex_say_what_the_tables_say(study, written):
    text, tex = (written / "report.md").read_text(), (written / "report.tex").read_text()
    for table in tables.tables(study):
        for block in table.blocks:
            for row in block.rows:
                shown = [f"**{c.text}**" if c.best else c.text for c in row]
                assert f"| {' | '.join(shown)} |" in text
                for cell in row[table.labels :]:
                    if cell.value is not None:
                        number = cell.text.replace(" ± ", r"{\pm}").replace(",", "{,}")
                        assert (rf"\mathbf{{{number}}}" if cell.best else f"${number}$") in tex
    for name in re.findall(r"figures/[\w-]+\.png", text):
        assert (written / name).stat().st_size > 5000
        assert (written / name).with_suffix(".pdf").read_bytes().startswith(b"%PDF")


def balanced(tex):
    opened = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", tex):
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert not opened
    plain = re.sub(r"\\[{}$&%#_]", "", tex)
    assert plain.count("{") == plain.count("}")
    assert plain.count("$") % 2 == 0


@pytest.mark.parametrize("which", ["trained", "studies"])
def test_latex_compiles(which, request, tmp_path):
    found = tables.tables(study_of(request.getfixturevalue(which)))
    (tmp_path / "report.tex").write_text(tables.document(found))
    balanced(tables.document(found))
    for table in found:
        for row in re.findall(r"^(?!\\)(.*) \\\\$", tables.latex(table), re.M):
            columns = (
                row.count("&") - row.count(r"\&") + sum(int(n) - 1 for n in re.findall(r"multicolumn\{(\d+)", row))
            )
            assert columns == len(table.heads) - 1
    if shutil.which("pdflatex") and shutil.which("kpsewhich"):
        there = subprocess.run(["kpsewhich", "booktabs.sty"], capture_output=True, check=False).returncode == 0
        if there:
            run = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "report.tex"]
            done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stdout[-2000:]
            assert "Overfull" not in done.stdout or which == "studies"


def test_the_page_has_the_same_numbers(study, trained, results, written):
    text = (written / "report.html").read_text()
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1])
    read = results(trained)
    assert len(text.encode()) < 5_000_000
    for v in data["variants"]:
        method = {"FedSAP": "fedsap", "FedProto": "fedproto", "FedAvg": "fedavg"}[v["label"]]
        for m in ("head", "proto", "proto_cos", "head_own"):
            mean = 100 * statistics.fmean(read[method, seed]["accuracy"][m]["mean"] for seed in (1, 2))
            assert v["last"][m][0] == pytest.approx(mean, abs=1e-3)
            assert v["curves"][m]["y"][-1] == pytest.approx(mean, abs=1e-3)
    for one in data["clients"]:
        method = {"FedSAP": "fedsap", "FedProto": "fedproto", "FedAvg": "fedavg"}[one["label"]]
        expected = [100 * x for x in read[method, one["seed"]]["accuracy"]["head"]["per_client"]]
        assert one["accuracy"]["head"] == pytest.approx(expected, abs=1e-3)
    for table in tables.tables(study):
        for cell in (c for b in table.blocks for row in b.rows for c in row if c.value is not None):
            assert f'data-value="{cell.value}"' in text


def test_the_command_makes_the_same_configuration(studies, varied):
    for run in varied.runs:
        words = shlex.split(command(run, [run.seed]))
        pairs = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        method = words[words.index("--method") + 1]
        (config,) = resolve(assignments(pairs), [method], [run.seed])
        assert decisive(config) == run.config


def test_sweeps_are_in_the_page(varied):
    data = content(varied, {}, [])
    one = next(s for s in data["sweeps"] if s["key"] == "method.proxy_scale")
    expected = [statistics.fmean(mean_last(varied, name, "head")) for name in ("s8", "plain")]
    assert one["points"]["head"]["y"] == pytest.approx(expected, abs=1e-3)
