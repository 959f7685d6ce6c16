"""Rows of a CSV file."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.measure import Result, Settings, speedup
from benchmarks.end_to_end.models import Subject
from benchmarks.environment import Environment

THEIRS = "ort-"  # variants of ONNX Runtime's own begin with it


@dataclasses.dataclass(frozen=True)
class Row:
    """One variant of one subject; None is an empty field. See `measure.Result` for what is not explained."""

    date: str
    commit: str
    device: str
    driver: str
    versions: str
    subject: str
    batch: int
    tokens: int  # of each sequence
    layers: int
    dtype: str
    launch: str  # "graph": ONNX Runtime replays a CUDA graph; "stream": it launches every kernel
    variant: str
    note: str
    rounds: int | None
    median_ms: float | None
    low_ms: float | None
    high_ms: float | None
    over_plain: float | None  # how many times as fast as "plain", median over rounds of pairs
    over_ort: float | None  # the same against ONNX Runtime's best
    best_ort: str  # which of its variants that is
    device_mib: float | None
    error: float | None
    cpu_error: float | None
    clocks: str  # of the GPU, right after


def rows(subject: Subject, results: Iterable[Result], settings: Settings, where: Environment, clocks: str) -> list[Row]:
    """Rows of what was measured on one subject."""
    results = list(results)
    theirs = [result for result in results if result.variant.startswith(THEIRS) and result.median_ms is not None]
    best = min(theirs, key=lambda result: result.median_ms or 0.0).variant if theirs else ""
    return [
        Row(
            **dataclasses.asdict(where),
            subject=subject.name,
            batch=subject.batch,
            tokens=subject.tokens,
            layers=subject.config["num_hidden_layers"],
            dtype=subject.dtype,
            launch="graph" if settings.cuda_graph else "stream",
            variant=result.variant,
            note=result.note.splitlines()[0] if result.note else "",
            rounds=result.rounds,
            median_ms=result.median_ms,
            low_ms=result.low_ms,
            high_ms=result.high_ms,
            over_plain=speedup(results, result.variant, "plain"),
            over_ort=speedup(results, result.variant, best),
            best_ort=best,
            device_mib=result.device_mib,
            error=result.error,
            cpu_error=result.cpu_error,
            clocks=clocks,
        )
        for result in results
    ]


def append(path: Path, new: Iterable[Row]) -> None:
    """Adds rows to a file, which gets its header if there is none yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)])
        if is_new:
            writer.writeheader()
        for row in new:
            writer.writerow({name: _text(value) for name, value in dataclasses.asdict(row).items()})


def _text(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
