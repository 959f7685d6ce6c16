"""The command: which workloads and backends, how long, and what it shows meanwhile."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks import backends as all_backends
from benchmarks import environment, table, workloads
from benchmarks.backends.base import Backend
from benchmarks.measure import DeviceLostError, Settings, measure
from benchmarks.results import MEASURED, Row, Writer
from benchmarks.workloads import Workload

BUDGETS = {"cuda": 0.06, "cpu": 1.0}  # seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes the CSV file row by row, prints the tables."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        import torch
    except ImportError:
        parser.error("PyTorch is needed for memory, clocks and the reference: pip install torch")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = workloads.select(workloads.for_device(device), options.only)
        backends = all_backends.select(all_backends.every(), options.backends)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        _list(chosen, backends, device)
        return 0
    stream: AbstractContextManager[Any] = nullcontext()
    if device == "cuda":  # graphs cannot be captured on the default stream
        torch.cuda.init()
        stream = torch.cuda.stream(torch.cuda.Stream())
    with stream:
        rows = _run(options, device, chosen, backends)
    print()
    print(table.render(rows), end="")
    print(f"\n{options.output}: {len(rows)} rows")
    return 0 if any(row.status == MEASURED for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--list", action="store_true", help="show workloads and backends, and what is missing here; measure nothing")
    add("--only", default="", metavar="NAMES", help="workloads or groups, separated by commas, with * and ?")
    add("--backends", default="", metavar="NAMES", help="separated by commas; default: all (sessions: see README.md)")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where PyTorch has it")
    add("--budget", type=float, metavar="S", help="seconds of measured time for each backend on each workload")
    add("--limit", type=float, default=float("inf"), metavar="S", help="begin no workload after so many seconds")
    add("--output", type=Path, default=Path("build/benchmarks.csv"), metavar="FILE", help="default: %(default)s")
    add("--ceilings", choices=("auto", "known", "measured"), default="auto", help="auto: known ones on an H200")
    add("--clock", choices=("graph", "event"), default="graph", help="CUDA: replay graphs where that works, or not")
    add("--keep-cache", action="store_true", help="CUDA: do not write the L2 cache between calls")
    add("--commit", help="what to note as the commit; default: what git says")
    return parser


def _run(options: argparse.Namespace, device: str, chosen: list[Workload], backends: list[Backend]) -> list[Row]:
    begin = time.monotonic()
    say = _printer()
    reasons = {b.name: reason for b in backends if (reason := b.unavailable(device))}
    for name, reason in reasons.items():
        say(f"{name} is left out: {reason}")
    where = environment.describe(device, library_version(), options.commit)
    ceilings = environment.ceilings(device, where.device, options.ceilings)
    rates = ", ".join(f"{kind} {rate / 1e12:.3g}" for kind, rate in ceilings.flops.items())
    say(f"{where.device}; {where.versions}")
    say(f"ceilings: {rates} TFLOP/s, {ceilings.bandwidth / 1e12:.3g} TB/s ({ceilings.source})")
    settings = Settings(
        device, options.budget or BUDGETS[device], graphs=options.clock == "graph", flush=not options.keep_cache
    )
    writer, rows = Writer(options.output), []
    said = set(reasons.items())
    for i, workload in enumerate(chosen, 1):
        if time.monotonic() - begin > options.limit:
            say(
                f"--limit: {len(chosen) - i + 1} workloads were not begun: {', '.join(w.name for w in chosen[i - 1 :])}"
            )
            break
        part = [b for b in backends if options.backends or workload.sessions or not b.session]
        try:
            done = measure(workload, part, settings, where, ceilings, reasons)
        except DeviceLostError as error:
            say(f"{workload.name}: {error}. What was measured before is in {options.output}.")
            break
        writer.write(done)
        rows += done
        say(f"{time.monotonic() - begin:6.1f} s  {i}/{len(chosen)}  {workload.name}: {_brief(done, said)}")
    writer.close()
    return rows


def _brief(rows: list[Row], said: set[tuple[str, str]]) -> str:
    """One line: microseconds by backend, or why there are none, each reason once in a run."""
    texts = []
    for row in rows:
        if row.status == MEASURED:
            texts.append(f"{row.backend} {(row.median_ms or 0) * 1e3:.4g} µs")
        elif (row.backend, row.status) not in said:
            texts.append(f"{row.backend} – ({row.status})")
            said.add((row.backend, row.status))
    return ", ".join(texts)


def _list(chosen: list[Workload], backends: list[Backend], device: str) -> None:
    say = _printer()
    for workload in chosen:
        cost = f"{workload.flops / 1e9:9.4g} GFLOP {workload.bytes / 2**20:8.4g} MiB"
        remark = "" if workload.sessions else "  (sessions only if asked for)"
        say(f"{workload.group:9} {workload.name:30} {workload.shape:44} {cost}{remark}")
    for backend in backends:
        say(f"{backend.name:14} {backend.unavailable(device) or 'available'}")


def library_version() -> str:
    from flashonnx._capi import Library
    from flashonnx._library import library_path

    try:
        return Library(library_path()).version()
    except Exception as error:  # reported as the reason why ours is left out
        return f"none ({type(error).__name__})"


def _printer() -> Callable[[str], None]:
    """Prints lines, by rich where it is installed."""
    try:
        from rich.console import Console
    except ImportError:
        return lambda text: print(text, flush=True)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    return console.print
