"""Peak memory of one call."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")
_CLEAR_PEAK = "5"  # proc(5): resets the peak resident set size


def peak(call: Callable[[], Tensor], device: str) -> tuple[Tensor, int | None]:
    """Runs the call; its result, and the bytes that were in use at the peak beyond what was there before.

    CUDA: what PyTorch's allocator gave out at the peak, or what the device lost to others (ONNX Runtime's arena keeps
    what it once had, so that its first run shows its peak). CPU: growth of the peak of the process's resident set, or
    None where the system does not tell.
    """
    return _peak_cuda(call) if device == "cuda" else _peak_cpu(call)


def _peak_cuda(call: Callable[[], _T]) -> tuple[_T, int]:
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    free = torch.cuda.mem_get_info()[0]
    result = call()
    torch.cuda.synchronize()
    others = (free - torch.cuda.mem_get_info()[0]) - (torch.cuda.memory_reserved() - reserved)
    return result, torch.cuda.max_memory_allocated() - before + max(0, others)


def _peak_cpu(call: Callable[[], _T]) -> tuple[_T, int | None]:
    try:
        Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK)
        before = _resident("VmRSS")
    except OSError:
        return call(), None
    result = call()
    return result, max(0, _resident("VmHWM") - before)


def _resident(field: str) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0
