"""A token by its logits: the greatest, or one that is drawn.

This runs between two steps of a model, so that what looks at all words is a pass over memory, and nothing is sorted
but the few that may be drawn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 128
_NEGATIVE_INFINITY = 0xFC00  # in float16; NaN is beyond it


@dataclass(frozen=True)
class Draw:
    """How tokens are chosen.

    Attributes:
        temperature: 0 takes the greatest logit; otherwise the logits are divided by it.
        top_k: only that many greatest logits may be drawn; 0: all.
        top_p: of those the fewest, most likely first, whose chances come to at least top_p; 1: all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def choose(
    best: tuple[list[int], list[float]],
    rows: Callable[[float], tuple[NDArray[Any], bool]],
    how: Draw,
    randoms: Sequence[np.random.Generator],
) -> list[int]:
    """A token for each row of logits, (rows, words) of float32 or float16; each row draws with its own generator.

    Args:
        best: where the greatest of each row is, and how great: see `greatest`.
        rows: is asked where something is drawn, with the temperature: the logits and False, or their weights and True.
        how: to choose.
        randoms: the rows' generators.

    Raises:
        FloatingPointError: the greatest of a row is NaN or infinite.
    """
    tokens, values = best
    for value in values:
        _check(value)
    if not how.temperature:
        return tokens
    temperature = max(np.float32(how.temperature), np.finfo(np.float32).tiny)  # smaller ones would become 0
    given, are_weights = rows(float(temperature))
    result = []
    with np.errstate(over="ignore"):  # of a division by a small temperature
        for row, value, random in zip(given, values, randoms, strict=True):
            most = None if are_weights else np.float32(value)
            result.append(_draw(row, functools.partial(_weighed, most=most, temperature=temperature), how, random))
    return result


def greatest(logits: NDArray[Any]) -> tuple[list[int], list[float]]:
    """Where the greatest of each row is, of equal ones the first, NaN being the greatest; and how great it is."""
    tokens = _places(logits)
    return tokens, [logits.item(row, token) for row, token in enumerate(tokens)]


def _check(number: float) -> None:
    """Of a sum or a maximum: whether all are numbers."""
    if not math.isfinite(number):
        raise FloatingPointError("Generator: the model's logits are expected to be finite, got NaN or infinity")


def _draw(
    row: NDArray[Any], weigh: Callable[[NDArray[Any]], NDArray[np.float32]], how: Draw, random: np.random.Generator
) -> int:
    kept = _greatest_few(_ordered(row), how.top_k) if 0 < how.top_k < len(row) else None
    weights = weigh(row if kept is None else row[kept])
    if how.top_p < 1:
        nucleus = _nucleus(weights, how.top_p)
        kept, weights = nucleus if kept is None else kept[nucleus], weights[nucleus]
    token = _drawn(weights, random.random())
    return token if kept is None else int(kept[token])


def _weighed(some: NDArray[Any], most: np.float32 | None, temperature: np.float32) -> NDArray[np.float32]:
    """Chances of some logits, up to a factor; without `most`, the greatest logit, they are that already."""
    if most is None:
        return some
    return np.exp((some.astype(np.float32, copy=False) - most) / temperature)


def _places(logits: NDArray[Any]) -> list[int]:
    """Where the greatest are.

    NumPy compares float16 slowly. Their bits as integers are in the order of the numbers if these are positive, NaN
    last; negative ones have greater bits, if these are unsigned, in the opposite order, and NaN last again.
    """
    if logits.dtype != np.float16:
        return logits.argmax(1).tolist()
    signed, unsigned = logits.view(np.int16), logits.view(np.uint16)
    places = signed.argmax(1).tolist()
    for row, last in enumerate(unsigned.argmax(1).tolist()):
        if signed.item(row, places[row]) <= 0 or unsigned.item(row, last) > _NEGATIVE_INFINITY:
            places[row] = int(logits[row].astype(np.float32).argmax())  # rare: none is positive, or there is NaN
    return places


def _ordered(logits: NDArray[Any]) -> NDArray[Any]:
    """Numbers in the same order, which NumPy compares quickly: of float16 the bits, of negative ones turned over."""
    if logits.dtype != np.float16:
        return logits
    bits = logits.view(np.int16)
    return bits ^ ((bits >> 15) & np.int16(0x7FFF))


def _greatest_few(x: NDArray[Any], count: int) -> NDArray[np.intp]:
    """Where the `count` greatest are, in the order of their places."""
    groups = len(x) // _BLOCK
    if count < groups:
        # Every groups-th number is one group. In as many of them something is at least the count-th of their greatest.
        most = x[: groups * _BLOCK].reshape(_BLOCK, groups).max(0)
        _check(most.max())
        places = np.flatnonzero(x >= np.partition(most, -count)[-count])
    else:
        places = np.arange(len(x))
    return np.sort(places[np.argpartition(x[places], -count)[-count:]])


def _nucleus(weights: NDArray[np.float32], top_p: float) -> NDArray[np.intp]:
    """The fewest, greatest first and of equal ones the first, that come to at least top_p of the sum; by place."""
    total = weights.sum(dtype=np.float64)
    _check(total)
    # All that are below an even share of what may be left out are left out: only the others are sorted.
    some = np.flatnonzero(weights >= (1 - top_p) * total / len(weights))
    some = some[np.argsort(-weights[some], kind="stable")]
    count = int(np.searchsorted(weights[some].cumsum(dtype=np.float64), top_p * total, "left")) + 1
    return np.sort(some[:count])


def _drawn(weights: NDArray[np.float32], share: float) -> int:
    """The place at which the running sum of the weights passes that share of their sum: first the block, then there."""
    if len(weights) <= _BLOCK:
        ends = weights.cumsum(dtype=np.float64)
        _check(ends[-1])
        return _passed(ends, share * ends[-1])
    blocks = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64).cumsum()
    _check(blocks[-1])
    goal = share * blocks[-1]
    block = _passed(blocks, goal)
    first, before = block * _BLOCK, blocks[block - 1] if block else 0.0
    return first + _passed(before + weights[first : first + _BLOCK].cumsum(dtype=np.float64), goal)


def _passed(ends: NDArray[np.float64], goal: float) -> int:
    return min(int(ends.searchsorted(goal, "right")), len(ends) - 1)
