"""Cells, marks and scores, from results written by hand."""

import json
import math

import pytest

from fedsap.experiments.catalogue import chosen
from fedsap.experiments.compare import WAYS, Way, agreement, cells, measured, scores
from fedsap.experiments.plan import Change, plan, select
from fedsap.report.against import against, ranking


def places(tmp_path, name="table1", words=(), **change):
    found = plan(chosen([name]), tmp_path, Change(**change))
    return select(found, words) if words else found


def result(run, head, proto, best=0.0, own=0.0, cos=0.0, sil=0.1, rows=()):
    """What a run leaves, accuracies as shares of 1."""
    run.folder.mkdir(parents=True)
    values = {"head": head, "head_own": own or head, "proto": proto, "proto_cos": cos or proto}
    content = {
        "accuracy": {k: {"mean": v, "best": best or v, "best_round": 1, "per_client": []} for k, v in values.items()},
        "silhouette": sil,
        "comm": {"up": {"numbers": 30_208.0, "bytes": 0.0}},
        "seconds": 1.0,
    }
    (run.folder / "result.json").write_text(json.dumps(content))
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def fill(place, heads, protos):
    for run, head, proto in zip(place.runs, heads, protos, strict=True):
        result(run, head, proto)


def test_a_cell_is_the_mean_over_seeds_beside_the_papers(tmp_path):
    (place,) = places(tmp_path, words=["cifar10", "n=3", "fedsap"])  # 92.68 +- 1.29 / 86.98 +- 2.65
    fill(place, [0.90, 0.91, 0.92], [0.80, 0.82, 0.81])
    head, proto = cells([place])
    assert (head.mean, head.std) == (pytest.approx(91.0), pytest.approx(1.0))
    assert head.difference == pytest.approx(91.0 - 92.68)
    assert head.agrees  # within 2 * 1.29
    assert proto.difference == pytest.approx(81.0 - 86.98)
    assert not proto.agrees  # further than 2 * 2.65
    assert agreement([head, proto]) == {"agree": 1, "compared": 2, "all": 2}
    assert head.to_dict()["seeds"] == [1234, 1235, 1236]


@pytest.mark.parametrize(("value", "near"), [(0.8759 + 0.0149, True), (0.8759 - 0.0151, False)])
def test_one_and_a_half_points_are_near_where_the_deviation_is_small(tmp_path, value, near):
    (place,) = places(tmp_path, words=["cifar100", "n=10", "fedsap"], seeds=(1,))  # 87.59 +- 0.26
    fill(place, [value], [0.5])
    assert cells([place])[0].agrees is near


def test_what_is_not_measured_has_no_figures(tmp_path):
    (place,) = places(tmp_path, words=["cifar10", "n=3", "fedsap"])
    head, _ = cells([place])
    assert (head.mean, head.difference, head.agrees) == (None, None, False)
    assert agreement([head]) == {"agree": 0, "compared": 0, "all": 1}


def test_a_method_without_prototypes_on_its_server_has_none(tmp_path):
    (place,) = places(tmp_path, words=["cifar10", "n=3", "fedavg"])
    assert [cell.measure for cell in cells([place])] == ["head"]


def test_figures_of_a_round_are_those_of_its_row(tmp_path):
    (place,) = places(tmp_path, "silhouette", ["fedsap"])
    row = {"accuracy": {"proto": [0.5, None, 1.0]}}
    rows = [{"round": t, "silhouette": t / 1000, **row} if t % 5 == 0 else {"round": t} for t in range(1, 101)]
    result(place.runs[0], 0.5, 0.5, rows=rows)
    assert [measured(place, place.runs[0], f"silhouette@{t}") for t in (10, 48, 100)] == [0.010, 0.050, 0.100]
    assert measured(place, place.runs[0], "proto@10") == 75.0
    assert measured(place, place.runs[0], "silhouette") == 0.1
    first, *_, last = cells([place])
    assert (first.claim.mean, last.claim.mean) == (0.1549, 0.4655)
    assert not first.agrees


def test_numbers_sent_are_in_thousands(tmp_path):
    (place,) = places(tmp_path, "table2", ["cifar10", "fedsap"])
    result(place.runs[0], 0.5, 0.5)
    assert measured(place, place.runs[0], "up") == 30.208
    assert measured(place, place.runs[0], "up_client") == pytest.approx(1.5104)
    assert cells([place])[0].agrees


def test_a_score_is_the_root_mean_squared_difference_of_every_way_to_count(tmp_path):
    found = places(tmp_path, words=["cifar10", "n=3", "fedsap", "fedproto"], seeds=(1,))
    proto, sap = found  # fedproto 89.04 / 89.84, fedsap 92.68 / 86.98
    result(proto.runs[0], head=0.8004, proto=0.8984, own=0.8904, cos=0.5, best=0.95)
    result(sap.runs[0], head=0.9268, proto=0.8398, own=0.9368, cos=0.8698, best=0.9)
    by_way = {s.way: s for s in scores(found)}
    assert set(by_way) == set(WAYS)
    plain = by_way[Way()]
    assert plain.cells == 4
    assert plain.distance == pytest.approx(math.sqrt((9**2 + 0 + 0 + 3**2) / 4))
    assert plain.lead == pytest.approx(math.sqrt((9**2 + 3**2) / 2))  # measured leads minus the paper's: 9 and -3
    own = by_way[Way("head_own", "proto", "mean")]
    assert own.distance == pytest.approx(math.sqrt((0 + 0 + 1 + 3**2) / 4))
    assert by_way[Way("head_own", "proto_cos", "best")].distance == pytest.approx(
        math.sqrt(((95 - 89.04) ** 2 + (95 - 89.84) ** 2 + (90 - 92.68) ** 2 + (90 - 86.98) ** 2) / 4)
    )
    assert scores(found)[0].distance == min(s.distance for s in by_way.values())
    (row,) = ranking(scores(found)).blocks[0].rows
    assert row[2].value == pytest.approx(plain.distance)
    assert row[4].value == scores(found)[0].distance


def test_readings_are_ranked(tmp_path):
    found = places(tmp_path, "study", ["cifar10", "fedsap", "the text", "64 pixels"], seeds=(1,))
    text, larger = found
    result(text.runs[0], 0.80, 0.80)
    result(larger.runs[0], 0.92, 0.87)
    rows = ranking(scores(found)).blocks[0].rows
    assert [row[0].text for row in rows] == ["64 pixels", "the text"]


def test_the_table_has_paper_measured_difference_and_footnotes(tmp_path):
    found = places(tmp_path, words=["cifar10", "n=3", "fedsap", "fedavg"])
    for place in found:
        fill(place, [0.92, 0.93, 0.94], [0.5, 0.5, 0.5])
    table = against(found)
    assert [name for _, name in table.heads[2:5]] == ["paper", "measured", "difference"]
    by_label = {row[1].text: row for row in table.blocks[0].rows}
    sap = next(row for label, row in by_label.items() if label.startswith("FedSAP"))
    assert [c.text for c in sap[2:5]] == ["92.68 ± 1.29", "93.00 ± 1.00", "+0.32"]
    assert [c.best for c in sap[4:8:3]] == [True, False]
    avg = next(row for label, row in by_label.items() if label.startswith("FedAvg"))
    assert [c.text for c in avg[5:]] == ["–", "–", "–"]
    letter = sap[5].text.partition("[")[2].rstrip("]")
    assert f"[{letter}] In the paper this is below FedProto's 89.84" in table.caption
    assert "up to 10.69 over FedProto" in table.caption


def test_the_ablations_first_row_says_whose_figure_it_is(tmp_path):
    found = places(tmp_path, "table4", ["neither"])
    fill(found[0], [0.8] * 3, [0.8] * 3)
    assert "79.70 is FedMPS's figure in the paper's Table 1; FedProto's is 80.98" in against(found).caption


def test_variants_are_compared_with_a_base_seed_by_seed(tmp_path):
    found = places(tmp_path, "plus-cpu", ["digits"])
    by_variant = {p.variant: p for p in found}
    fill(by_variant["fedsap"], [0.80, 0.90, 0.70], [0.5, 0.5, 0.5])
    fill(by_variant["+ inertia"], [0.81, 0.92, 0.73], [0.4, 0.5, 0.6])
    table = against(found)
    rows = {row[1].text: row for row in table.blocks[0].rows}
    assert [name for _, name in table.heads[2:4]] == ["measured", "minus FedSAP"]
    assert rows["+ inertia"][3].text == "+2.00 ± 1.00"
    assert rows["+ inertia"][5].text == "+0.00 ± 10.00"
    assert rows["FedSAP"][3].text == "–"
