"""Colours and marks: told apart by colour-blind people, and never by colour alone."""

from itertools import combinations

import numpy as np
import pytest

from fedsap.report import look
from fedsap.report.colours import CLASSES, PALETTE

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SEEN = {
    "all": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour):
    v = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(v <= 0.04045, v / 12.92, ((v + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    x = XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eyes", SEEN)
def test_colours_of_lines_differ_for_all_eyes(eyes):
    seen = {c: lab(SEEN[eyes] @ linear(c)) for c in PALETTE}
    assert min(np.linalg.norm(seen[a] - seen[b]) for a, b in combinations(PALETTE, 2)) > 16


def test_lines_stand_out_from_white():
    assert max((XYZ @ linear(c))[1] for c in PALETTE) < 0.45  # yellow's is 0.76


def test_as_many_methods_as_there_are_differ_in_more_than_colour():
    marks = [(look.colour(i), look.dash(i), look.marker(i)) for i in range(32)]
    assert len(set(marks)) == 32
    for one, other in combinations(marks, 2):
        assert one[0] != other[0] or (one[1] != other[1] and one[2] != other[2])


def test_classes_differ_in_colour_or_mark():
    assert len({look.of_class(c) for c in range(62)}) == 62
    assert len(set(CLASSES)) == 10


def test_a_legend_of_many_does_not_shrink_the_panel():
    heights = []
    for number in (2, 20):
        figure, (ax,) = look.panels(1)
        look.legend(figure, [look.line(f"method {i}", i) for i in range(number)])
        figure.draw_without_rendering()
        heights.append(ax.get_window_extent().height)
    assert heights[1] > 0.9 * heights[0]
