"""Clocks, and the order in which contenders take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

FEWEST, MOST = 5, 200  # rounds
_WRITES = 4  # of the L2 cache before a call: some 200 µs, in which a host that takes 100 for the call gets ahead


class Clock(Protocol):
    """Times calls; what it times may still be running when it returns."""

    def time(self, call: Callable[[], object]) -> Callable[[], float]:
        """Runs the call; what is returned gives its seconds, after `wait`."""

    def wait(self) -> None:
        """Until all that was started is done."""


class HostClock:
    """Wall-clock time until the call returns: for CPUs, and for calls that wait for their device themselves."""

    def time(self, call: Callable[[], object]) -> Callable[[], float]:
        """Runs the call to its end."""
        begin = time.perf_counter()
        call()
        seconds = time.perf_counter() - begin
        return lambda: seconds

    def wait(self) -> None:
        """Nothing is left to wait for."""


class EventClock:
    """CUDA events on PyTorch's current stream, around one call.

    The call is put behind a write of the L2 cache, or else behind some idle turns of the device, and nothing is waited
    for in between: the device is kept busy and the host runs ahead, so that the time it takes to launch does not count.
    """

    _TURNS = 600_000  # clock cycles, some 0.3 ms: the host's part of a session's call takes 0.1

    def __init__(self, flush: bool = True) -> None:
        import torch

        size = 4 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size if flush else 0
        self._scratch = torch.empty(size, dtype=torch.uint8, device="cuda")

    def time(self, call: Callable[[], object]) -> Callable[[], float]:
        """Enqueues the call."""
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(_WRITES if self._scratch.numel() else 0):
            self._scratch.zero_()
        if not self._scratch.numel():
            torch.cuda._sleep(self._TURNS)
        begin.record()
        call()
        end.record()
        return lambda: begin.elapsed_time(end) / 1e3

    def wait(self) -> None:
        """Until the device is idle."""
        import torch

        torch.cuda.synchronize()


def interleave(
    calls: Mapping[str, Callable[[], object]],
    clock: Clock | Mapping[str, Clock],
    rounds: int,
    before_wait: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each call in each round, A B C A B C ...: what drifts between rounds, drifts for all.

    Args:
        calls: by name.
        clock: times them; or one for each.
        rounds: how often each is called.
        before_wait: called while the last ones may still be running, to look at the device's clocks.
    """
    clocks = clock if isinstance(clock, Mapping) else dict.fromkeys(calls, clock)
    pending: dict[str, list[Callable[[], float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            pending[name].append(clocks[name].time(call))
    before_wait()
    for each in dict.fromkeys(clocks.values()):
        each.wait()
    return {name: [seconds() for seconds in each] for name, each in pending.items()}


def rounds_for(estimates: Sequence[float], budget: float) -> int:
    """How many rounds fit into `budget` seconds for each contender, whose calls take `estimates` seconds."""
    total = sum(estimates)
    if total <= 0:
        return FEWEST
    return max(FEWEST, min(MOST, int(budget * len(estimates) / total)))


class Spread(NamedTuple):
    """The middle half of some times."""

    median: float
    low: float  # a quarter is below
    high: float  # a quarter is above


def spread(times: Sequence[float]) -> Spread:
    """Median and quartiles (of a single time: three times itself)."""
    if len(times) == 1:
        return Spread(times[0], times[0], times[0])
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Spread(median, low, high)


def paired_ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """The median over rounds of times / base: each pair was measured side by side."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


def capture(call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """The call as a CUDA graph: its replay, and the tensor into which each replay writes.

    The call must have run before, so that nothing is loaded or compiled in it now.
    """
    import torch

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        out = call()

    def replay(kept: object = call) -> None:  # the graph knows no more than addresses of what the call has
        graph.replay()

    return replay, out
