"""Positions out of tables that the exporter computed, as it does for sequences of fixed length."""

from __future__ import annotations

import numpy as np
import pytest
from test_masks import SELF
from test_structure import CAUSAL, TRIANGLE, check, model_of

LENGTH = 5
PLACES = np.arange(LENGTH)


def pairs(rows: np.ndarray | int, places: np.ndarray, order: int = 1) -> str:
    """A constant of (row, place) for each query, or of (place, row)."""
    table = np.stack(np.broadcast_arrays(rows, places)[::order], axis=-1)
    return f"pairs = Constant<value = int64[{LENGTH},2] {{{','.join(map(str, table.flat))}}}>()"


def looked_up(table: str, shape: tuple[str, str] = ("o0", "in")) -> dict[str, object]:
    model = model_of(
        f"{table} row = Unsqueeze({shape[1]}, {shape[0]}) at = GatherND(row, pairs) {TRIANGLE}", SELF.replace("s", "5")
    )
    return check(model, *({"b": b} for b in (1, 3)))


def test_indices_in_a_constant() -> None:
    assert looked_up(pairs(0, PLACES)) == CAUSAL
    assert looked_up(pairs(0, PLACES, order=-1), ("o1", "in")) == CAUSAL  # a column instead of a row


@pytest.mark.parametrize(
    "places",
    [PLACES[::-1], np.array([0, 1, 2, 4, 3]), np.array([0, 1, 2, 3, -1]), np.array([1, 2, 3, 4, 4]), PLACES // 2],
)
def test_other_indices_in_a_constant(places: np.ndarray) -> None:
    """They are no positions, or not proved to be: the mask stays, and the answers."""
    assert "is_causal" not in looked_up(pairs(0, places))
