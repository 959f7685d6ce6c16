"""How `flashonnx bench` measures: in turns, peak memory on the first call, in one process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashonnx._progress import step
from flashonnx.cli._contenders import Contender
from flashonnx.cli._errors import of_onnxruntime

FEWEST, MOST = 3, 200  # rounds
_WARM_UP = 2
_LONGEST_REASON = 160  # characters
_CLEAR_PEAK = "5"  # proc(5): resets the peak resident set size


@dataclass
class Result:
    """One contender at one length; what was not measured is None, and `status` says why."""

    contender: str
    length: int
    status: str = "measured"
    ours: bool = False
    median_ms: float | None = None
    low_ms: float | None = None  # first and third quartile
    high_ms: float | None = None
    rounds: int = 0
    tflops: float | None = None
    peak_bytes: int | None = None

    def content(self) -> dict[str, Any]:
        """For JSON and CSV."""
        return asdict(self)


def measure(
    contenders: Iterable[Contender],
    lengths: Sequence[int],
    device: str,
    budget: float,
    flops: Callable[[int], float] | None = None,
    wrong: Callable[[int, str, list[Any]], str] = lambda length, name, outputs: "",
) -> list[Result]:
    """Every contender at every length, shortest first; who fails at one is not asked for longer ones.

    Args:
        contenders: take turns in this order.
        lengths: to measure at.
        device: "cpu" or "cuda".
        budget: seconds of measured time for each contender at each length.
        flops: floating-point operations of a length.
        wrong: why the outputs of a contender are wrong, "" if they are right.
    """
    contenders, out = list(contenders), set[str]()
    results: list[Result] = []
    for length in sorted(lengths):
        calls: dict[str, Callable[[], Any]] = {}
        rows = {c.name: Result(c.name, length, ours=c.ours) for c in contenders if c.name not in out}
        for contender in [c for c in contenders if c.name in rows]:
            step(f"{length}: {contender.name}")
            row = rows[contender.name]
            try:
                call = contender.open(length)
                row.peak_bytes = _peak(call, device, contender.torch)
                row.status = wrong(length, contender.name, contender.read()) or row.status
            except Exception as error:
                row.status = _reason(error)
            if row.status == "measured":
                calls[contender.name] = call
            else:
                out.add(contender.name)
                contender.close()
        step(f"{length}: measuring")
        for name, times in _timed(calls, budget).items():
            row, quarters = rows[name], statistics.quantiles(times, n=4, method="inclusive")
            row.low_ms, row.median_ms, row.high_ms = (1e3 * t for t in quarters)
            row.rounds = len(times)
            if flops is not None:
                row.tflops = flops(length) / quarters[1] / 1e12
        calls.clear()
        for contender in contenders:
            contender.close()
        gc.collect()
        results += rows.values()
    return results


def _timed(calls: dict[str, Callable[[], Any]], budget: float) -> dict[str, list[float]]:
    """Seconds of each call, round by round, A B C A B C ..."""
    if not calls:
        return {}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_WARM_UP):
        for name, call in calls.items():
            times[name] = [_seconds(call)]
    total = sum(each[0] for each in times.values())
    rounds = max(FEWEST, min(MOST, int(budget * len(calls) / max(total, 1e-9))))
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_seconds(call))
    return times


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _peak(call: Callable[[], Any], device: str, is_torch: bool) -> int | None:
    """Runs the first call; bytes in use at its peak beyond what was there before it, None where nothing tells.

    PyTorch loads much with its first call, and keeps nothing from one to the next, so there it is the second one.
    """
    if is_torch:
        call()
    gc.collect()
    if device == "cuda":
        return _peak_torch(call) if is_torch else _peak_device(call)
    with contextlib.suppress(OSError, AttributeError):  # free memory that is kept would hide what is taken
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK)
        before = _resident("VmRSS")
    except OSError:
        call()
        return None
    call()
    return max(0, _resident("VmHWM") - before)


def _peak_torch(call: Callable[[], Any]) -> int:
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return int(torch.cuda.max_memory_allocated() - before)


def _peak_device(call: Callable[[], Any]) -> int | None:
    """What the device has less than before: ONNX Runtime's arena keeps what it once had."""
    before = free_memory()
    call()
    after = free_memory()
    return None if before is None or after is None else max(0, before - after)


def free_memory() -> int | None:
    """Bytes that are free on the current CUDA device, by cuda-python or PyTorch; None with neither."""
    try:
        from cuda.bindings import runtime

        status, free, _ = runtime.cudaMemGetInfo()
        return None if int(status) else int(free)
    except Exception:  # not installed, or without a driver
        pass
    try:
        import torch

        return int(torch.cuda.mem_get_info()[0])
    except Exception:
        return None


def _resident(field: str) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _reason(error: Exception) -> str:
    """In one short line."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"no: {textwrap.shorten(of_onnxruntime(text), _LONGEST_REASON, placeholder=' …')}"


def where(device: str) -> dict[str, str]:
    """What the numbers depend on."""
    from importlib import metadata

    import onnxruntime

    import flashonnx

    names = {"device": _cpu()}
    if device == "cuda":
        from flashonnx.cli._checks import device_names

        names = {"device": (device_names() or ["a CUDA device"])[0], "host": _cpu()}
    names |= {"flashonnx": flashonnx.__version__, "ONNX Runtime": onnxruntime.__version__}
    with contextlib.suppress(metadata.PackageNotFoundError):
        names["PyTorch"] = metadata.version("torch")
    return names | {"NumPy": np.__version__}


def _cpu() -> str:
    name = ""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        name = found[1] if found else ""
    return f"{name or 'CPU'}, {len(os.sched_getaffinity(0))} logical CPUs"
