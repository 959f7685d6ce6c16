"""What `fuse` and `export_onnx` are given, checked before anything is read or made."""

from __future__ import annotations

import difflib
import operator
from typing import Any

KV_CACHES = ("static", "paged")


def check_flags(function: str, **flags: Any) -> None:
    """Requires True or False: a word such as "no" would count as True.

    Raises:
        TypeError: one is something else.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{function}: {name} is expected to be True or False, got {value!r:.40}")


def check_kv_cache(function: str, kind: Any) -> None:
    """Requires one of KV_CACHES, or None.

    Raises:
        TypeError: it is no text.
        ValueError: it is another one.
    """
    expected = f"{function}: kv_cache is expected to be {', '.join(map(repr, KV_CACHES))} or None, got {kind!r:.40}"
    if kind is not None and not isinstance(kind, str):
        raise TypeError(expected)
    if kind is not None and kind not in KV_CACHES:
        close = difflib.get_close_matches(kind.lower(), KV_CACHES, 1, cutoff=0.8)
        raise ValueError(expected + (f"; did you mean {close[0]!r}?" if close else ""))


def check_opset(function: str, opset: Any, oldest: int, newest: int) -> None:
    """Requires a whole number between these.

    Raises:
        TypeError: it is none.
        ValueError: it is another one.
    """
    expected = f"{function}: opset is expected to be {oldest} to {newest}, got {opset!r:.40}"
    try:
        number = operator.index(opset)
    except TypeError:
        raise TypeError(expected) from None
    if not oldest <= number <= newest:
        raise ValueError(expected)
