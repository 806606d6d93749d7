import os
import signal
import subprocess
import sys

import pytest
import torch

from fedsap.engines.flower.store import Store
from fedsap.errors import UserError


def state(value):
    return {"state/model/w": torch.full((2, 3), float(value))}


def test_the_newest_and_the_one_it_was_made_from_are_kept(tmp_path):
    store = Store(tmp_path)
    for since, t in ((0, 1), (1, 4), (4, 9)):
        store.save(3, t, state(t), since)
    assert store.rounds(3) == [4, 9]
    assert store.load(3, 4)["state/model/w"].tolist() == [[4.0] * 3] * 2


def test_the_state_that_counts_stays_however_many_answers_are_lost(tmp_path):
    store = Store(tmp_path)
    for since, t in ((0, 1), (1, 2), (1, 3), (1, 4)):
        store.save(0, t, state(t), since)
    assert store.rounds(0) == [1, 4]


def test_what_came_after_is_gone_when_a_round_is_played_again(tmp_path):
    store = Store(tmp_path)
    for t in (1, 2, 3):
        store.save(0, t, state(t), t - 1)
    store.save(0, 2, state(20), 1)
    assert store.rounds(0) == [2]
    store.save(0, 3, state(30), 2)
    assert store.rounds(0) == [2, 3]


def test_a_missing_state_says_what_there_is(tmp_path):
    store = Store(tmp_path)
    store.save(0, 5, state(5), 4)
    with pytest.raises(UserError, match="its state of round 4 is not here; there is 5"):
        store.load(0, 4)
    with pytest.raises(UserError, match="there is none"):
        store.load(1, 4)


def test_a_damaged_state_is_said_to_be(tmp_path):
    store = Store(tmp_path)
    store.save(0, 5, state(5), 4)
    path = tmp_path / "client-0000" / "round-000005.safetensors"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match="its state of round 5 is damaged"):
        store.load(0, 5)


def test_kill_nine_while_saving_leaves_whole_states(tmp_path):
    """A process that saves without end is killed again and again: whatever is there can be read and is of one round."""
    script = f"""
import torch
from pathlib import Path
from fedsap.engines.flower.store import Store
store = Store(Path({str(tmp_path)!r}))
t = max(store.rounds(0), default=0)
print("ready", flush=True)
while True:
    t += 1
    store.save(0, t, {{"a": torch.full((300_000,), float(t)), "b": torch.full((300_000,), float(t))}}, t - 1)
"""
    for i in range(3):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2 + 0.13 * i)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        store = Store(tmp_path)
        assert len(store.rounds(0)) >= 1
        for t in store.rounds(0):
            assert {float(v.unique()) for v in store.load(0, t).values()} == {float(t)}
