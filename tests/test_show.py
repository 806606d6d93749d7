"""What a run looks like in a terminal."""

import io

import pytest
from rich.console import Console

from fedsap.show import Progressing

LOSS = {"ce": [1.5, 2.5], "high": [18.0, 18.0], "low": [3.8, 3.8], "soft": [0.25, None]}
ACCURACY = {"head": [0.5, 0.7], "proto": [0.25, 0.25], "proto_cos": [1.0, 1.0]}
ROWS = [{"round": 1, "loss": LOSS}, {"round": 2, "loss": LOSS, "accuracy": ACCURACY}]


@pytest.mark.parametrize("width", [80, 140])
def test_a_terminal_shows_round_time_left_losses_and_accuracies(width):
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, color_system=None, width=width)
    with Progressing("fedmps seeds 1234, 1235, 1236", 1000, 0, console) as progress:
        for row in ROWS:
            progress(row)
    last = said.getvalue()[-400:]
    for part in ("fedmps seeds 1234, 1235, 1236", "round 2/1000", "left",
                 "ce 2.000 high 18.000 low 3.800 soft 0.250", "head 60.0%  L2 25.0%  cos 100.0%"):  # fmt: skip
        assert part in last


def test_elsewhere_evaluated_rounds_are_plain_lines():
    said = io.StringIO()
    with Progressing("fedmps seed 1", 2, 0, Console(file=said, width=40)) as progress:
        for row in ROWS:
            progress(row)
    expected = (
        "fedmps seed 1: round 2/2  loss: ce 2.000 high 18.000 low 3.800 soft 0.250  head 60.0%  L2 25.0%  cos 100.0%"
    )
    assert said.getvalue().splitlines() == [expected]
