"""Embeddings of snapshots in the plane, by t-SNE.

Vectors are brought to unit length first, so that near means a small cosine distance, as for the silhouette, and a
prototype lies among its class whatever its length. Prototypes are laid out together with the embeddings. Each round
starts from the layout of the one before it: points move as their embeddings do, and no further.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsap.errors import UserError
from fedsap.report.read import Complain, Floats, RunData
from fedsap.report.study import Study
from fedsap.snapshots import Snapshot, load_snapshot

POINTS = 500  # in a layout of a report
LAYOUTS = 36  # in a report
ROUNDS = 6  # of a run


@dataclass(frozen=True)
class Layout:
    """One round of one run in the plane, within [-1, 1].

    rows: [n] of the snapshot, points: [n, 2], labels: [n], clients: [n], stars: [m, 2] and their classes [m]
    """

    round: int
    rows: NDArray[np.int64]
    points: Floats
    labels: NDArray[np.int64]
    clients: NDArray[np.int64]
    stars: Floats
    classes: NDArray[np.int64]


Layouts = dict[tuple[str, str], list[Layout]]  # by setting and label


@dataclass(frozen=True)
class Place:
    """A variant whose embeddings are laid out: the run of its first seed that has kept some, and which rounds of it."""

    setting: str
    label: str
    run: RunData
    rounds: tuple[int, ...]


def chosen(study: Study, most: int = LAYOUTS) -> list[Place]:
    """What is laid out: the last kept round of each variant, and the rounds before it, variant by variant, as far
    as `most` layouts go."""
    found = [
        (setting.label, v.label, run)
        for setting in study.settings
        for v in study.of(setting.label)
        if (run := next((run for run in v.runs if run.snapshots), None)) is not None
    ][:most]
    left, places = most - len(found), []
    for setting, label, run in found:
        rounds = spread(run.snapshots)
        if len(rounds) - 1 > left:
            rounds = rounds[-1:]
        left -= len(rounds) - 1
        places.append(Place(setting, label, run, tuple(rounds)))
    return places


def shortened(study: Study, places: Sequence[Place]) -> str:
    """What is said of embeddings that were kept and are not laid out; empty if there are none."""
    firsts = [next((run for run in v.runs if run.snapshots), None) for v in study.variants]
    kept = sum(len(run.snapshots) for run in firsts if run is not None)
    shown = sum(len(place.rounds) for place in places)
    return "" if shown == kept else (
        f"embeddings: {shown} of {kept} kept rounds are laid out, the last of each method first; "
        "a report of fewer runs has room for the others"
    )  # fmt: skip


def spread(rounds: Sequence[int], most: int = ROUNDS) -> list[int]:
    """At most `most` rounds, from the first to the last.

    >>> spread([10, 50, 75, 100]), spread(range(1, 101), 4)
    ([10, 50, 75, 100], [1, 34, 67, 100])
    """
    places = np.linspace(0, len(rounds) - 1, min(most, len(rounds))).round().astype(int)
    return [rounds[i] for i in places.tolist()]


def layouts(place: Place, complain: Complain, points: int = POINTS) -> list[Layout]:
    """The rounds of a variant; one that is damaged costs a line."""
    found: list[Layout] = []
    for t in place.rounds:
        try:
            found.append(lay_out(load_snapshot(place.run.folder, t), points, found[-1] if found else None))
        except UserError as error:
            complain(f"{error}; left out")
    return found


def lay_out(snapshot: Snapshot, points: int = POINTS, before: Layout | None = None) -> Layout:
    """One snapshot, of which `points` embeddings are drawn, the same in every round."""
    total = len(snapshot.labels)
    rows = np.sort(np.random.default_rng(0).permutation(total)[:points])
    labels, classes = snapshot.labels[rows], np.flatnonzero(snapshot.seen)
    vectors = np.concatenate([snapshot.embeddings[rows], snapshot.prototypes[classes]])
    start = None
    if before is not None and np.array_equal(before.rows, rows):
        centre = {int(c): before.points[before.labels == c].mean(axis=0) for c in np.unique(before.labels)}
        known = dict(zip(before.classes.tolist(), before.stars, strict=True))
        stars = [known.get(int(c), centre.get(int(c), np.zeros(2))) for c in classes]
        start = np.concatenate([before.points, np.reshape(stars, (-1, 2))])
    flat = plane(vectors, start)
    return Layout(snapshot.round, rows, flat[: len(rows)], labels, snapshot.clients[rows], flat[len(rows) :], classes)


def plane(vectors: NDArray[np.float32], start: Floats | None = None) -> Floats:
    """t-SNE of vectors [N, d], within [-1, 1]; from a layout [N, 2] if there is one."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = (vectors / np.where(length > 0, length, 1)).astype(np.float32)
    number, d = units.shape
    if number < 4 or np.ptp(units, axis=0).max() < 1e-7:
        return np.zeros((number, 2)) if start is None else start
    if d > 50:
        units = PCA(min(50, number), svd_solver="randomized", random_state=0).fit_transform(units)
    init = "pca" if start is None else (start / max(float(start[:, 0].std()), 1e-12) * 1e-4).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PCA of vectors that hardly differ divides by nothing
        tsne = TSNE(
            perplexity=min(30.0, (number - 1) / 3),
            init=init,
            random_state=0,
            max_iter=750 if start is None else 500,
        )
        with threadpool_limits(1 if number < 2000 else None):  # threads that wait for each other cost more than they do
            flat = np.asarray(tsne.fit_transform(units), float)
    flat -= (flat.max(axis=0) + flat.min(axis=0)) / 2
    if start is not None:
        left, _, right = np.linalg.svd(flat.T @ (start - start.mean(axis=0)))
        flat = flat @ (left @ right)  # turned and mirrored to where the points were
    return flat / max(float(np.abs(flat).max()), 1e-12)
