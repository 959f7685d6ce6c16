"""One workload: every backend prepared, looked at by the gate, and timed in turns; rows come out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import environment, memory, problems, timing
from benchmarks.backends.base import Backend, Runner, UnsupportedError
from benchmarks.correctness import Gate
from benchmarks.environment import Ceilings, Environment
from benchmarks.problems import Problem
from benchmarks.results import MEASURED, Row
from benchmarks.workloads import Workload

if TYPE_CHECKING:
    from torch import Tensor

_HOST_ROUNDS = 5  # of whole calls that wait, which are timed besides


@dataclass(frozen=True)
class Settings:
    """How to measure."""

    device: str  # "cuda" or "cpu"
    budget: float  # seconds of measured time for each backend on each workload
    graphs: bool = True  # replay CUDA graphs where a backend can be captured
    flush: bool = True  # write the L2 cache between calls


@dataclass
class Contender:
    """A backend on its way through one workload."""

    backend: Backend
    status: str = ""  # why it is out; "" while it is in
    problem: Problem | None = None  # kept, as runners may know no more than its tensors' addresses
    runner: Runner | None = None
    gate: Gate | None = None
    call: Callable[[], object] = lambda: None  # what is timed
    output: Tensor | None = None  # where the call's result stands
    clock: str = ""
    launches: int = 1  # of what is timed
    note: str = ""
    peak: int | None = None
    errors: tuple[float, float] | None = None
    times: list[float] = field(default_factory=list)
    host: float | None = None


def measure(
    workload: Workload,
    backends: Sequence[Backend],
    settings: Settings,
    where: Environment,
    ceilings: Ceilings,
    reasons: dict[str, str] | None = None,
    make: Callable[[Workload, str], Problem] = problems.make,
) -> list[Row]:
    """Rows of one workload, one for each backend that it concerns, in their order.

    Args:
        workload: what to compute.
        backends: take turns in this order.
        settings: how to measure.
        where: goes into the rows.
        ceilings: for the ceiling of the workload.
        reasons: why a backend cannot be used here at all, by name.
        make: the problem of a workload.
    """
    reasons = reasons or {}
    gc.collect()
    gc.freeze()  # what lives on, modules above all, is not gone through again for each contender
    contenders = [Contender(b, reasons.get(b.name, "")) for b in backends if b.concerns(workload)]
    problem = make(workload, settings.device)
    gates: dict[bool, Gate] = {}
    for contender in contenders:
        if not contender.status:
            _guarded(contender, partial(_prepare, contender, problem, gates, settings), settings.device)
    clocks = _time([c for c in contenders if not c.status], settings, workload)
    for contender in contenders:
        if not contender.status:  # a race shows in one of the last results, if not in the first
            _guarded(contender, partial(_check, contender), settings.device)
    return _rows(contenders, workload, where, ceilings, clocks)


def _release(device: str) -> None:
    """Gives back what is not used any more, so that the next one finds the memory."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


class DeviceLostError(Exception):
    """A backend left the device in a state in which nothing else can be measured by this process."""


def _guarded(contender: Contender, step: Callable[[], None], device: str) -> None:
    """Runs a step; if it fails, the contender is out, with the reason, and its memory is free.

    Raises:
        DeviceLostError: if the device went with it.
    """
    try:
        step()
    except UnsupportedError as error:
        contender.status = f"unsupported: {_first_line(error)}"
    except Exception as error:
        # Peers fail in their own ways; whatever it is stands in the row.
        contender.status = f"{type(error).__name__}: {_first_line(error)}"
        if device == "cuda":
            _look_after(contender)
    if contender.status:
        contender.runner = contender.output = None
        contender.call = lambda: None
        contender.times = []


def _look_after(contender: Contender) -> None:
    """An illegal access of one backend would else show as a failure of whichever comes next."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise DeviceLostError(f"{contender.backend.name} lost the device: {contender.status}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _prepare(contender: Contender, problem: Problem, gates: dict[bool, Gate], settings: Settings) -> None:
    import torch

    backend = contender.backend
    _release(settings.device)
    own = contender.problem = backend.problem(problem)
    contender.gate = gates.setdefault(own.mask is None, Gate(own))
    with torch.no_grad():
        contender.runner = runner = backend.prepare(own)
        contender.output, contender.peak = memory.peak(runner.run, settings.device)
        if contender.peak is not None:
            contender.peak += runner.allocated
        _check(contender)
        contender.call, contender.clock = runner.run, "event" if settings.device == "cuda" else "host"
        if settings.device == "cuda" and settings.graphs and runner.capturable:
            try:
                call = _launches(contender, own)
                contender.call, contender.output = timing.capture(call)
            except RuntimeError as error:
                contender.note = f"not captured: {_first_line(error)}"
                return
            contender.clock, contender.launches = "graph", own.workload.launches
            contender.output.fill_(float("nan"))
            contender.call()
            _check(contender)


def _launches(contender: Contender, problem: Problem) -> Callable[[], Tensor]:
    """All launches of the workload in one call, whose output is the first one's."""
    assert contender.runner is not None
    launches, copies = problem.workload.launches, problem.workload.copies
    problems = [problem] + [problem.elsewhere() for _ in range(copies - 1)]
    runners = [contender.runner] + [contender.backend.prepare(other) for other in problems[1:]]
    for runner in runners[1:]:
        runner.run()

    def call(kept: object = problems) -> Tensor:
        outputs = [runners[i % copies].run() for i in range(launches)]
        return outputs[0]

    return call


def _check(contender: Contender) -> None:
    assert contender.gate is not None and contender.output is not None
    contender.errors = contender.gate.check(contender.output, contender.backend.rounds_scores)


def _time(contenders: list[Contender], settings: Settings, workload: Workload) -> str:
    """Fills in times; what the GPU's clocks were meanwhile."""
    import torch

    clocks: list[str] = []
    on_gpu = settings.device == "cuda"
    calls = {c.backend.name: c.call for c in contenders}
    if not calls:
        return ""
    clock = _clocks(contenders, settings, workload)
    with torch.no_grad():
        timing.interleave(calls, clock, 1)
        estimates = [min(times) for times in timing.interleave(calls, clock, 2).values()]
        rounds = timing.rounds_for(estimates, settings.budget)
        look = (lambda: clocks.append(environment.clocks())) if on_gpu else (lambda: None)
        measured = timing.interleave(calls, clock, rounds, look)
        for contender in contenders:
            contender.times = [seconds / contender.launches for seconds in measured[contender.backend.name]]
            if contender.runner is not None and contender.runner.blocking is not None:
                host = timing.interleave({"": contender.runner.blocking}, timing.HostClock(), _HOST_ROUNDS)[""]
                contender.host = timing.spread(host).median
    return clocks[0] if clocks else ""


def _clocks(contenders: list[Contender], settings: Settings, workload: Workload) -> dict[str, timing.Clock]:
    """What times each: with a write of the L2 cache before the call, unless it shall find there what it left.

    Graphs of several launches take care of that themselves, by copies in turn where they shall find nothing.
    """
    if settings.device != "cuda":
        return dict.fromkeys((c.backend.name for c in contenders), timing.HostClock())
    written, kept = (timing.EventClock(flush) for flush in (settings.flush, False))
    is_cold = workload.launches == 1 or workload.copies > 1
    return {c.backend.name: written if is_cold and c.launches == 1 else kept for c in contenders}


def _rows(
    contenders: list[Contender], workload: Workload, where: Environment, ceilings: Ceilings, clocks: str
) -> list[Row]:
    ceiling, bound = ceilings.seconds(workload)
    timed = {c.backend.name: c.times for c in contenders if not c.status}
    peers = [c.backend.name for c in contenders if c.backend.peer and not c.status]
    best = min(peers, key=lambda name: timing.spread(timed[name]).median, default="")
    shape: dict[str, Any] = {
        "workload": workload.name,
        "group": workload.group,
        "dtype": workload.dtype,
        "batch": workload.batch,
        "q_heads": workload.heads[0],
        "kv_heads": workload.heads[1],
        "q_length": workload.lengths[0],
        "kv_length": workload.lengths[1],
        "head_dim": workload.head_dim,
        "causal": workload.causal,
        "window": workload.window,
        "mask": f"{workload.mask} {workload.mask_dtype}" if workload.mask else "",
        "ceiling_ms": ceiling * 1e3,
        "bound": bound,
        "ceilings": ceilings.source,
    }
    rows = []
    for contender in contenders:
        backend = contender.backend
        row: dict[str, Any] = {"backend": backend.name, "peer": backend.peer, "status": contender.status or MEASURED}
        if contender.errors is not None:
            row |= {"error": contender.errors[0], "allowed_error": contender.errors[1]}
        if not contender.status:
            row |= _numbers(contender, workload, ceiling) | {"clocks": clocks, "best_peer": best}
            if "ours" in timed:
                row["ours_speedup"] = timing.paired_ratio(contender.times, timed["ours"])
            if best:
                row["ratio_to_best_peer"] = timing.paired_ratio(timed[best], contender.times)
        rows.append(Row(**asdict(where), **shape, **row))
    return rows


def _numbers(contender: Contender, workload: Workload, ceiling: float) -> dict[str, Any]:
    assert contender.runner is not None
    spread = timing.spread(contender.times)
    return {
        "kernel": "; ".join(filter(None, (contender.runner.kernel, contender.note))),
        "clock": contender.clock,
        "rounds": len(contender.times),
        "median_ms": spread.median * 1e3,
        "low_ms": spread.low * 1e3,
        "high_ms": spread.high * 1e3,
        "host_ms": None if contender.host is None else contender.host * 1e3,
        "tflops": workload.flops / spread.median / 1e12,
        "gbps": workload.bytes / spread.median / 1e9,
        "share_of_ceiling": ceiling / spread.median,
        "peak_mib": None if contender.peak is None else contender.peak / 2**20,
    }
