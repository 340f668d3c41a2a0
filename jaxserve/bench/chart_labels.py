"""Puts labels beside the points of curves where they cover no point, no line and no other label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_FONT_POINTS = 8
_LETTER = 0.68  # width of a digit as a share of the font's size
# Where a label may stand, by how far it lies right and up of its point.
_DIRECTIONS = ((1, -1), (-1, 1), (1, 1), (-1, -1), (1, 0), (-1, 0), (0, 1), (0, -1))
_DISTANCES = (5.0, 9.0)  # points of 1/72 inch


@dataclass(frozen=True)
class LabelledCurve:
    """Points in data units, with a label for each."""

    x: Sequence[float]
    y: Sequence[float]
    labels: Sequence[str]
    colour: str


Box = tuple[float, float, float, float]  # left, bottom, right, top in pixels


def label_curves(figure: Figure, axes: Axes, curves: Sequence[LabelledCurve]) -> None:
    """Labels the ends of every curve, and of the other points those that there is room for."""
    figure.draw_without_rendering()  # places the axes, so that data has pixels
    paths = [axes.transData.transform(np.column_stack((curve.x, curve.y))) for curve in curves]
    segments = np.concatenate([np.hstack((path[:-1], path[1:])) for path in paths])
    scale = figure.dpi / 72
    taken: list[Box] = [(x - 5, y - 5, x + 5, y + 5) for path in paths for x, y in path.tolist()]
    frame = axes.get_window_extent()
    for number, index in _by_importance(curves):
        curve, (x, y) = curves[number], paths[number][index].tolist()
        is_end = index in (0, len(curve.x) - 1)
        free: list[tuple[float, Box, tuple[float, float], tuple[int, int]]] = []
        for box, offset, direction in _places(x, y, curve.labels[index], scale):
            inside = frame.x0 < box[0] and box[2] < frame.x1 and frame.y0 < box[1] and box[3] < frame.y1
            if inside and not any(_overlap(box, other) for other in taken):
                free.append((_num_crossed(box, segments), box, offset, direction))
        if not free or (min(free)[0] and not is_end):
            continue
        _, box, offset, (right, up) = min(free, key=lambda place: place[0])
        taken.append(box)
        axes.annotate(
            curve.labels[index], (curve.x[index], curve.y[index]), xytext=offset, textcoords="offset points",
            fontsize=_FONT_POINTS, color=curve.colour, ha=("center", "left", "right")[right],
            va=("center", "bottom", "top")[up],
        )  # fmt: skip


def _by_importance(curves: Sequence[LabelledCurve]) -> Iterator[tuple[int, int]]:
    """Number of curve and point: last points first, then first ones, then what lies between."""
    yield from ((number, len(curve.x) - 1) for number, curve in enumerate(curves))
    yield from ((number, 0) for number, curve in enumerate(curves) if len(curve.x) > 1)
    for number, curve in enumerate(curves):
        yield from ((number, index) for index in range(len(curve.x) - 2, 0, -1))


def _places(x: float, y: float, label: str, scale: float) -> Iterator[tuple[Box, tuple[float, float], tuple[int, int]]]:
    """Boxes in pixels where a label may stand, each with its offset in points and its direction, best first."""
    width, height = _LETTER * _FONT_POINTS * len(label) * scale, _FONT_POINTS * scale
    for distance in _DISTANCES:
        for right, up in _DIRECTIONS:
            across = distance if right and up else distance + 2
            offset = (across * right, (2 if right and up else distance) * up)
            left = x + offset[0] * scale - width * (1 - right) / 2
            bottom = y + offset[1] * scale - height * (1 - up) / 2
            yield (left, bottom, left + width, bottom + height), offset, (right, up)


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _num_crossed(box: Box, segments: np.ndarray) -> int:
    """How many of the lines (start and end, [lines, 4]) go through a box: each is cut to it (Liang and Barsky's way)."""
    start, way = segments[:, :2], segments[:, 2:] - segments[:, :2]
    low, high = np.asarray(box[:2]), np.asarray(box[2:])
    still = np.where(way == 0, 1e-9, way)
    first, second = (low - start) / still, (high - start) / still
    enters = np.maximum(np.minimum(first, second).max(axis=1), 0.0)
    leaves = np.minimum(np.maximum(first, second).min(axis=1), 1.0)
    return int((enters < leaves).sum())
