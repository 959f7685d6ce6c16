"""Latency and peak memory of one model, alone in a process.

`python measure.py MODEL CPU|CUDA BATCH SEQUENCE` prints them as JSON.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

WARM_UP, RUNS, BUDGET = 2, 30, 4.0  # runs, runs, seconds


@dataclass(frozen=True)
class Measurement:
    """Of one model on one shape."""

    milliseconds: float  # the median run
    memory: float | None  # MB at the peak: of the process (CPU), or on the device beyond what was there before (CUDA)


def measure(model: str, device: str, batch: int, sequence: int) -> Measurement:
    import flashonnx

    # Exactly what is asked for, not the next power of two, so that memory can be compared.
    cuda = ("CUDAExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})
    before = device_memory() if device == "CUDA" else None
    session = flashonnx.session(model, [cuda, "CPUExecutionProvider"] if device == "CUDA" else ["CPUExecutionProvider"])
    ids = np.random.default_rng(0).integers(1000, 20000, (batch, sequence))
    mask = np.ones((batch, sequence), np.int64)
    mask[1::2, sequence * 3 // 4 :] = 0
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    feeds = {i.name: feeds[i.name] for i in session.get_inputs()}
    reset_peak()
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < WARM_UP + 3 or (len(times) < WARM_UP + RUNS and time.perf_counter() - started < BUDGET):
        start = time.perf_counter()
        session.run(None, feeds)
        times.append(time.perf_counter() - start)
    if device == "CUDA":
        after = device_memory()
        memory = None if before is None or after is None else (after - before) / 2**20
    else:
        memory = peak_memory()
    return Measurement(1e3 * statistics.median(times[WARM_UP:]), memory)


def reset_peak() -> None:
    """Forgets the process's peak so far: loading a model takes more than running it."""
    with contextlib.suppress(OSError):  # not permitted everywhere; then the peak includes loading
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> float | None:
    """The process's largest resident size in MB since `reset_peak`."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1024


def device_memory() -> int | None:
    """Bytes in use on the CUDA device, by whichever package can tell."""
    try:
        from cuda.bindings import runtime

        error, free, total = runtime.cudaMemGetInfo()
        if int(error) == 0:
            return total - free
    except (ImportError, OSError, RuntimeError):
        pass  # not installed, or without its CUDA
    try:
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free
    except (ImportError, RuntimeError, AssertionError):
        return None


if __name__ == "__main__":
    print(json.dumps(asdict(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))))
