"""Embeddings that a run keeps."""

import json

import numpy as np
import pytest
import torch

from fedsap import snapshots
from fedsap.config import resolve
from fedsap.errors import UserError
from fedsap.evaluate import Kept
from fedsap.federation import dataset
from fedsap.runs import Run, Stopped, metrics

USER = {
    "partition": {"clients": 4},
    "train": {"rounds": 4, "checkpoint": 0},
    "eval": {"every": 2, "snapshots": [1, 3, 4]},
}


@pytest.fixture(scope="module")
def data():
    return dataset(resolve({})[0])


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("whole") / "run", resolve(USER)[0])
    run.execute(data)
    return run


def content(folder, t):
    with np.load(folder / "snapshots" / f"round-{t:06d}.npz") as file:
        return {name: file[name] for name in file.files}


def test_the_rounds_asked_for_are_there_and_evaluated(whole):
    assert snapshots.rounds(whole.folder) == [1, 3, 4]
    assert [row["round"] for row in metrics(whole.folder) if "accuracy" in row] == [1, 2, 3, 4]


def test_the_same_images_in_every_round(whole, data):
    first, last = (snapshots.load_snapshot(whole.folder, t) for t in (1, 4))
    assert first.labels.tolist() == last.labels.tolist()
    assert first.clients.tolist() == last.clients.tolist()
    images = snapshots.load_images(whole.folder)
    assert images.shape == (len(first.labels), 8, 8, 1)
    known = {image.tobytes(): label for image, label in zip(data.test.images, data.test.labels, strict=True)}
    assert [known[image.tobytes()] for image in images] == first.labels.tolist()


def test_clients_hold_the_classes_of_their_embeddings(whole):
    owned = json.loads((whole.folder / "partition.json").read_text())["classes"]
    one = snapshots.load_snapshot(whole.folder, 4)
    assert all(label in owned[client] for label, client in zip(one.labels.tolist(), one.clients.tolist(), strict=True))
    assert np.flatnonzero(one.seen).tolist() == sorted({c for own in owned for c in own})


def test_stopped_and_resumed_is_never_stopped(whole, data, tmp_path):
    config = resolve(USER)[0]
    for after in (1, 3):
        seen = []
        run = Run(tmp_path / f"stopped-{after}", config)
        with pytest.raises(Stopped):
            run.execute(data, on_round=seen.append, stop=lambda seen=seen, after=after: len(seen) == after)
        # the process dies with a later snapshot written and its checkpoint not
        (run.folder / "snapshots" / "round-000004.npz").write_bytes(b"of a round that comes again")
        run.execute(data)
        assert snapshots.rounds(run.folder) == [1, 3, 4]
        for t in (1, 3, 4):
            for name, values in content(whole.folder, t).items():
                np.testing.assert_array_equal(values, content(run.folder, t)[name])


def test_a_method_without_a_bank_has_no_prototypes(data, tmp_path):
    run = Run(tmp_path / "run", resolve(USER, ["fedavg"])[0])
    run.execute(data)
    assert len(snapshots.load_snapshot(run.folder, 4).seen) == 0


def test_nothing_is_kept_unless_asked(data, tmp_path):
    run = Run(tmp_path / "run", resolve({"train": {"rounds": 1}, "partition": {"clients": 2}})[0])
    run.execute(data)
    assert not (run.folder / "snapshots").exists()
    assert "snapshots" not in (run.folder / "config.json").read_text()


def test_a_round_that_never_comes_is_a_mistake():
    with pytest.raises(UserError, match=r"eval\.snapshots: got 9, takes rounds up to the last one \(4\)"):
        resolve({"train": {"rounds": 4}, "eval": {"snapshots": [9]}})


def test_size_is_bounded(tmp_path):
    n, d = 2000, 512
    kept = Kept(torch.randn(n, d), torch.zeros(n).long(), torch.zeros(n).long(), torch.arange(n))
    snapshots.save_snapshot(tmp_path, 10, kept, torch.randint(0, 255, (n, 64, 64, 3), dtype=torch.uint8))
    assert (tmp_path / "snapshots" / "round-000010.npz").stat().st_size < 2.2e6
    assert (tmp_path / "snapshots" / "images.npz").stat().st_size < 6.3e6
