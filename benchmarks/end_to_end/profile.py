"""Where the device's time goes in one session: kernels by name, as PyTorch's profiler sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

_CALLS = 3
_LONGEST = 40
# Parts of kernels' names, ONNX Runtime's, cuBLAS', cuDNN's and ours; the first that fits counts.
_KINDS = (
    (
        "Q, K and V laid out",
        ("append_kernel", "order_kernel", "AddBiasTranspose", "Rotary", "RoPE", "Transpose", "Split"),
    ),
    ("attention", ("flashonnx::", "sdpa", "flash_fwd", "fmha")),
    ("matrix products", ("nvjet", "gemm", "cutlass", "xmma", "splitK")),
    ("normalisation", ("LayerNorm", "reduce_matrix", "OP_Pow", "OP_Sqrt", "OP_Reciprocal")),
    ("activation", ("Gelu", "Sigmoid", "Softmax")),
    ("sums and products by element", ("ElementWise", "BroadcastBias")),
)


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


def kinds(spent: Counter[str]) -> Counter[str]:
    """The same by kind of kernel."""
    found: Counter[str] = Counter()
    for name, time in spent.items():
        found[next((kind for kind, parts in _KINDS if any(part in name for part in parts)), "other")] += time
    return found


def table(run: Callable[[], None]) -> str:
    """The same as text: microseconds and shares of kinds, then of kernels; the longest first."""
    spent = kernels(run)
    total = sum(spent.values()) or 1.0
    lines = [f"{total:10.1f} us in all"]
    lines += [f"{time:10.1f} us {time / total:6.1%}  = {kind}" for kind, time in kinds(spent).most_common()]
    lines += [f"{time:10.1f} us {time / total:6.1%}  {name[:150]}" for name, time in spent.most_common(_LONGEST)]
    return "\n".join(lines) + "\n"
