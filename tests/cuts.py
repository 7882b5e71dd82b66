"""Shards of matrices, as hypothesis draws them."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st


class Cut(NamedTuple):
    """A matrix [rows, cols] that begins at global row `row0`, and its part [height, width] at (top, left)."""

    rows: int
    cols: int
    top: int
    left: int
    height: int
    width: int
    row0: int


def draw_cut(data: st.DataObject) -> Cut:
    """Any part of a small matrix, near the beginning of the whole or beyond 32 bits."""
    rows, cols = data.draw(st.integers(1, 40), label="rows"), data.draw(st.integers(1, 40), label="cols")
    top, left = data.draw(st.integers(0, rows - 1), label="top"), data.draw(st.integers(0, cols - 1), label="left")
    height, width = data.draw(st.integers(0, rows - top), label="height"), data.draw(st.integers(0, cols - left), label="width")
    return Cut(rows, cols, top, left, height, width, data.draw(st.sampled_from([0, 2**31 - 1, 2**40]), label="row0"))
