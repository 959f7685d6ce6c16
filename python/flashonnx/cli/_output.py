"""What commands say: for people, for programs, and while they work."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashonnx.cli._errors import StdoutError

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, and nothing else.")]
Dim = Annotated[
    list[str] | None,
    typer.Option("--dim", metavar="NAME=VALUE", help="Value of a symbolic dimension; may be repeated."),
]
_WIDE = 200  # columns of a table that goes into a file


def say(text: Any, style: str = "") -> None:
    """To stdout; what is no terminal gets no colours and no line breaks."""
    _write(_printed(Console(soft_wrap=True), text, markup=False, highlight=False, style=style))


def fail(text: str) -> None:
    """To stderr, if that can be written."""
    with contextlib.suppress(OSError):
        Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)


def emit(content: Any) -> None:
    """One JSON object to stdout."""
    _write(json.dumps(content, indent=2, allow_nan=False, default=_plain) + "\n")


def _write(text: str) -> None:
    """To stdout, at once.

    Raises:
        StdoutError: it cannot be written.
    """
    with _stdout_errors():
        sys.stdout.write(text)
        sys.stdout.flush()


def _printed(console: Console, content: Any, **options: Any) -> str:
    """What a console would print. It does not, as it has its own ways of failing."""
    with _stdout_errors(), console.capture() as captured:  # which writes an empty text
        console.print(content, **options)
    return captured.get()


@contextlib.contextmanager
def _stdout_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StdoutError(error) from error


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def number(value: float) -> float | str:
    """A number that JSON has, else its name: "nan", "inf"."""
    return value if value - value == 0 else str(value)


def units(count: float) -> str:
    """Bytes for people: "12.6 MB"."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    right: Sequence[int] = (),
    title: str = "",
    minimum: dict[int, int] | None = None,
) -> None:
    """A table on stdout: as wide as a terminal, else without limit.

    Args:
        heads: of the columns.
        rows: texts, or rich's Text for what has colours.
        right: columns that are flush right.
        title: above it.
        minimum: the least width of a column.
    """
    made = Table(box=None, pad_edge=False, header_style="bold", title=title or None, title_justify="left")
    made.title_style = "bold"
    for i, head in enumerate(heads):
        width = (minimum or {}).get(i)
        made.add_column(head, justify="right" if i in right else "left", overflow="fold", min_width=width)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    # Flush left lines need no blanks behind them, which files and tests would trip over.
    _write("\n".join(line.rstrip() for line in _printed(console, made).split("\n")))


def mark(ok: bool, yes: str = "ok", no: str = "no") -> Text:
    """Green or red."""
    return Text(yes if ok else no, "bold green" if ok else "bold red")


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """A spinner on a terminal while something is under way; what others print meanwhile goes to stderr."""
    from flashonnx._progress import listening

    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        if console.is_terminal:
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            progress = stack.enter_context(Progress(*columns, console=console, transient=True, redirect_stdout=False))
            task = progress.add_task(text, total=None)
            stack.enter_context(listening(lambda step: progress.update(task, description=f"{text}: {step}")))
        stack.enter_context(_stdout_is_stderr())
        yield


@contextlib.contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    """For Python, and for libraries that print by themselves."""
    flush = ctypes.CDLL(None).fflush  # of what C still holds back
    sys.stdout.flush()
    flush(None)
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)


def dims(pairs: list[str] | None, option: str = "--dim") -> dict[str, list[int]]:
    """NAME=VALUE, or NAME=VALUE,VALUE...: the numbers by name.

    Raises:
        ValueError: something else.
    """
    found: dict[str, list[int]] = {}
    for pair in pairs or []:
        name, separator, values = pair.partition("=")
        parts = values.split(",")
        if not name or not separator or not all(part.isdecimal() for part in parts):
            raise ValueError(f"{option} is expected as NAME=VALUE with a number, got '{pair}'")
        found[name] = [int(part) for part in parts]
    return found


def lengths(pairs: list[str] | None) -> dict[str, int]:
    """The same with one number for each name.

    Raises:
        ValueError: something else, or several numbers.
    """
    found = dims(pairs)
    for name, values in found.items():
        if len(values) != 1:
            raise ValueError(f"--dim is expected to have one value here, got {len(values)} for '{name}'")
    return {name: values[0] for name, values in found.items()}
