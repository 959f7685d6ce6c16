"""What is being done at the moment, for whoever watches: the command line shows it, nobody else has to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("flashonnx_listener", default=None)


def step(text: str) -> None:
    """Says that this begins now."""
    listener = _listener.get()
    if listener is not None:
        listener(text)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Within it, `listener` hears of each step."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
