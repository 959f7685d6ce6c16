"""Rows of results, and the CSV file that tables and plots are made from."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

MEASURED = "measured"  # Row.status; any other says why there is no time


@dataclass(frozen=True)
class Row:
    """One backend on one workload; None is an empty field."""

    date: str
    commit: str
    device: str
    driver: str
    versions: str
    workload: str
    group: str
    dtype: str
    batch: int
    q_heads: int
    kv_heads: int
    q_length: int
    kv_length: int
    head_dim: int
    causal: bool
    mask: str  # its dimensions and dtype, "b11k bool"
    backend: str
    peer: bool  # not ours, and none that computes something else
    status: str  # MEASURED, or why not
    window: int | None = None  # keys that a query sees at most; 0 for all
    kernel: str = ""  # what is known about how it was computed
    clock: str = ""  # "graph" (CUDA graph between events), "event" or "host"
    rounds: int | None = None
    median_ms: float | None = None
    low_ms: float | None = None  # first and third quartile
    high_ms: float | None = None
    host_ms: float | None = None  # of a whole call with synchronisation, where the clock is "event" but calls are dear
    tflops: float | None = None
    gbps: float | None = None  # of the bytes that must move at least
    ceiling_ms: float | None = None
    bound: str = ""  # what the ceiling comes from: "arithmetic" or "memory"
    ceilings: str = ""  # how the ceilings are known
    share_of_ceiling: float | None = None
    ours_speedup: float | None = None  # this time / that of "ours", median over rounds: above 1, ours is faster
    best_peer: str = ""
    ratio_to_best_peer: float | None = None  # the best peer's time / this one, likewise: above 1, this is faster
    peak_mib: float | None = None
    error: float | None = None
    allowed_error: float | None = None
    clocks: str = ""  # of the GPU while the workload ran


class Writer:
    """Writes rows as they come, so that a run that is cut short keeps what it has."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, [field.name for field in fields(Row)])
        self._writer.writeheader()

    def write(self, rows: Iterable[Row]) -> None:
        """Appends rows, at once."""
        for row in rows:
            self._writer.writerow({name: _text(value) for name, value in asdict(row).items()})
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read(*paths: Path) -> list[Row]:
    """The rows of one or more CSV files.

    Raises:
        ValueError: a file is not one of ours.
    """
    kinds = get_type_hints(Row)
    rows = []
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if missing := {"workload", "backend", "status"} - set(reader.fieldnames or ()):
                raise ValueError(f"{path}: not a file of results, it has no column {', '.join(sorted(missing))}")
            rows += [Row(**{k: _value(v, kinds[k]) for k, v in line.items() if k in kinds}) for line in reader]
    return rows


def _text(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def _value(text: str, kind: Any) -> Any:
    if kind is str:
        return text
    if kind is bool:
        return text == "True"
    if text == "":
        return None
    return int(text) if kind in (int, int | None) else float(text)
