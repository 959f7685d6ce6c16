"""What is given to a Generator, checked: an error names the argument, what was expected and what came."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def whole(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """A whole number of any type, in [least, most]."""
    expected = f"Generator: {name} is expected to be a whole number"
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{expected}, got {value!r:.40}") from None
    if isinstance(value, bool):
        raise TypeError(f"{expected}, got {value}")
    if number < least or (most is not None and number > most):
        where = f"of at least {least}" if most is None else f"in [{least}, {most}]"
        raise ValueError(f"{expected} {where}, got {number}")
    return number


def real(name: str, value: Any) -> float:
    """A number of any type that is not complex, NaN neither."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"Generator: {name} is expected to be a number, got {value!r:.40}")
    if value != value:
        raise ValueError(f"Generator: {name} is expected to be a number, got NaN")
    return float(value)


def stops(value: int | Iterable[int], words: int) -> frozenset[int]:
    """One token number, or several."""
    given = list(value) if isinstance(value, Iterable) else [value]
    try:
        if isinstance(value, (str, bytes, Mapping)) or any(isinstance(token, (bool, np.bool_)) for token in given):
            raise TypeError
        tokens = frozenset(map(operator.index, given))
    except TypeError:
        raise TypeError(f"Generator: stop is expected to be a token number or several, got {value!r:.40}") from None
    unknown = sorted(token for token in tokens if not 0 <= token < words)
    if unknown:
        raise ValueError(f"Generator: stop is expected to have tokens in [0, {words}), got {unknown[0]}")
    return tokens
