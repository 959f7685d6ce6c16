"""Where the numbers come from: device, versions, clocks, and how fast the device can be at all."""

from __future__ import annotations

import contextlib
import datetime
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks import timing
from benchmarks.workloads import Workload

PACKAGES = ("torch", "triton", "onnx", "flash-attn-4", "numpy")


@dataclass(frozen=True)
class Environment:
    """Stands in every row, so that rows of different runs can be told apart."""

    date: str  # of the run's start, UTC
    commit: str  # of the tree, with "+" if it was changed; "" if unknown
    device: str  # its name
    driver: str
    versions: str  # "torch=2.11.0; cuda=13.0; ..."


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches at best."""

    flops: dict[str, float]  # per second in matrix products, by dtype
    bandwidth: float  # bytes per second, read and written together
    source: str

    def seconds(self, workload: Workload) -> tuple[float, str]:
        """No workload runs in less time than this, and what bounds it: "arithmetic" or "memory"."""
        arithmetic = workload.flops / self.flops[workload.dtype]
        memory = workload.bytes / self.bandwidth
        return (arithmetic, "arithmetic") if arithmetic >= memory else (memory, "memory")


# 8192^3 products and a device-to-device copy, as PyTorch does them; float32 by the datasheet: a third of TF32, as
# three products of TF32 make one in full accuracy.
H200 = Ceilings({"bfloat16": 790e12, "float16": 790e12, "float32": 165e12}, 4.3e12, "H200 as measured before")


def describe(device: str, library_version: str, commit: str | None = None) -> Environment:
    """The environment of this run; `commit` where the tree is no git repository."""
    import torch

    versions = {"python": platform.python_version(), "flashonnx": library_version}
    versions |= {name: found for name in PACKAGES if (found := _version(name))}
    with contextlib.suppress(ImportError):  # its package has several names, of which more than one may be installed
        import onnxruntime

        versions["onnxruntime"] = onnxruntime.__version__
    name, driver = platform.processor() or platform.machine(), ""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        driver = _line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    else:
        name = f"{_cpu_name() or name}, {torch.get_num_threads()} threads"
    return Environment(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=_commit() if commit is None else commit,
        device=name,
        driver=driver,
        versions="; ".join(f"{name}={found}" for name, found in versions.items()),
    )


def clocks() -> str:
    """What the GPU does right now: "SM 1980 MHz, 412 W, 45 C"; "" where nothing tells."""
    import torch

    readings = []
    for reader, unit, scale in (
        (torch.cuda.clock_rate, "MHz", 1),
        (torch.cuda.power_draw, "W", 1000),
        (torch.cuda.temperature, "C", 1),
    ):
        try:
            readings.append(f"{reader() // scale} {unit}")
        except Exception:  # NVML, or its Python package, is not everywhere; each of its errors has its own class
            continue
    return ", ".join(readings)


def ceilings(device: str, device_name: str, mode: str = "auto") -> Ceilings:
    """The known ceilings of an H200, or measured ones.

    Args:
        device: "cuda" or "cpu".
        device_name: known ones are taken for "H200".
        mode: "known", "measured", or "auto": known where there are some.
    """
    known = device == "cuda" and "H200" in device_name
    if mode == "known" and not known:
        raise ValueError(f"--ceilings known: only those of an H200 are, and this is {device_name}")
    if known and mode != "measured":
        return H200
    return _measure_cuda() if device == "cuda" else _measure_cpu()


def _measure_cuda() -> Ceilings:
    import torch

    clock, size = timing.EventClock(), 8192
    flops = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        seconds = _best(partial(torch.mm, a, b, out=torch.empty_like(a)), clock, 10)
        flops[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / _best(lambda: target.copy_(source), clock, 10)
    return Ceilings(flops, bandwidth, "measured in this run")


def _measure_cpu() -> Ceilings:
    import torch

    clock, size = timing.HostClock(), 1024
    a, b = torch.randn(size, size), torch.randn(size, size)
    rate = 2 * size**3 / _best(lambda: a @ b, clock, 5)
    source = torch.zeros(256 << 20, dtype=torch.uint8)
    target = torch.zeros_like(source)
    bandwidth = 2 * source.numel() / _best(lambda: target.copy_(source), clock, 5)
    return Ceilings(dict.fromkeys(("bfloat16", "float16", "float32"), rate), bandwidth, "measured in this run")


def _best(call: Callable[[], object], clock: timing.Clock, repeats: int) -> float:
    for _ in range(3):
        call()
    return timing.spread(timing.interleave({"it": call}, clock, repeats)["it"]).median


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    revision = _line("git", "rev-parse", "--short=12", "HEAD")
    return revision + ("+" if revision and _line("git", "status", "--porcelain", "-uno") else "")


def _line(*command: str) -> str:
    """The first line that a command prints; "" if it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return lines[0].strip() if lines else ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
