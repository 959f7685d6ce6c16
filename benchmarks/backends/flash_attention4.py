"""FlashAttention-4 (the package flash-attn-4, CuTe DSL), if it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from benchmarks.backends.base import Backend, Runner, UnsupportedError
from benchmarks.problems import Problem

if TYPE_CHECKING:
    from torch import Tensor


class FlashAttention4(Backend):
    """`flash_attn.cute.flash_attn_func`; compiles for each new kind of problem when it is prepared."""

    name = "FA4"

    def unavailable(self, device: str) -> str | None:
        """Not on CPUs, not without the package."""
        if device == "cpu":
            return "for GPUs"
        try:
            found = find_spec("flash_attn.cute") is not None
        except ImportError:  # no flash_attn at all
            found = False
        if not found:
            return "flash_attn.cute is not installed: pip install flash-attn-4"
        try:
            import flash_attn.cute  # noqa: F401 - what it needs may be missing
        except Exception as error:
            return f"flash_attn.cute cannot be imported: {type(error).__name__}: {error}"
        return None

    def prepare(self, problem: Problem) -> Runner:
        """Compiles."""
        from flash_attn.cute import flash_attn_func

        if problem.mask is not None:
            raise UnsupportedError("takes no mask tensor")
        if problem.workload.dtype == "float32":
            raise UnsupportedError("takes float16 and bfloat16")
        options: dict[str, Any] = {"causal": problem.workload.causal}
        if problem.workload.window:
            options["window_size"] = (problem.workload.window - 1, 0)

        def run() -> Tensor:
            result = flash_attn_func(problem.q, problem.k, problem.v, **options)
            return result[0] if isinstance(result, tuple) else result

        run()
        return Runner(run)
