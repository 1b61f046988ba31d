"""Boxes against numpy: every element of a range once and in order, and what two boxes share."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_rl.parallel.boxes import Box, flat_boxes, intersection, moved, whole, within

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def cut(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


@settings(deadline=None)
@given(SHAPES, st.data())
def test_a_flat_range_in_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    array = np.arange(size).reshape(shape)
    boxes = list(flat_boxes(shape, start, end))
    actual = [cut(array, box).reshape(-1) for box in boxes]
    assert np.concatenate([np.array([], int), *actual]).tolist() == list(range(start, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@settings(deadline=None)
@given(SHAPES, st.data())
def test_what_two_boxes_share(shape: tuple[int, ...], data: st.DataObject) -> None:
    def draw() -> Box:
        low = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        return Box(low, tuple(data.draw(st.integers(1, n - o)) for o, n in zip(low, shape, strict=True)))

    first, second = draw(), draw()
    array = np.arange(prod(shape)).reshape(shape)
    common = set(cut(array, first).reshape(-1).tolist()) & set(cut(array, second).reshape(-1).tolist())
    actual = intersection(first, second)
    if actual is None:
        assert not common
        return
    assert set(cut(array, actual).reshape(-1).tolist()) == common
    inner = within(first, actual)
    assert cut(cut(array, first), inner).tolist() == cut(array, actual).tolist()
    assert moved(inner, first.offset) == actual
    assert intersection(whole(shape), actual) == actual
