"""Where the device's time goes in one session: kernels by name, as PyTorch's profiler sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

_CALLS = 3
_LONGEST = 40


def kernels(run: Callable[[], None]) -> Counter[str]:
    """Microseconds of a call by kernel."""
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_CALLS):
            run()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    for event in profiler.key_averages():
        spent[event.key] += event.self_device_time_total / _CALLS
    return spent


def table(run: Callable[[], None]) -> str:
    """The same as text: microseconds, share, kernel; the longest first."""
    spent = kernels(run)
    total = sum(spent.values()) or 1.0
    lines = [f"{total:10.1f} us in all"]
    lines += [f"{time:10.1f} us {time / total:6.1%}  {name[:150]}" for name, time in spent.most_common(_LONGEST)]
    return "\n".join(lines) + "\n"
