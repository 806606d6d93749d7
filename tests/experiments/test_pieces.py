"""benchmarks/piece.sh: pieces of a table on machines that come and go."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "piece.sh"


def test_what_one_machine_made_the_next_does_not_make_again(tiny, tmp_path):
    fedsap = tmp_path / "fedsap"
    fedsap.write_text(f'#!/bin/sh\nexec {sys.executable} -m fedsap.cli "$@"\n')
    fedsap.chmod(0o755)

    def piece(machine, only):
        words = ["table1", "--only", only, "--quick", "--set", "partition.clients=3", "--set", "train.rounds=2"]
        command = [str(SCRIPT), str(tmp_path / "kept"), "5", *words, "--data", str(tiny)]
        env = {**os.environ, "FEDSAP": str(fedsap), "WORK": str(tmp_path / machine)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "1 runs, 0 of them done" in piece("first", "cifar10,n=4,fedsap")
    assert "2 runs, 1 of them done" in piece("second", "cifar10,n=4,fedsap,fedproto")
    found = json.loads((tmp_path / "kept" / "last.json").read_text())
    assert found["complete"]
    assert all(c["mean"] is not None for c in found["experiments"][0]["cells"])
    one, other = (next((tmp_path / m).glob("*fedsap*/1234/metrics.jsonl")).read_text() for m in ("first", "second"))
    assert one == other
