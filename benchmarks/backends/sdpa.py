"""PyTorch's scaled_dot_product_attention, one of its backends at a time."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from benchmarks.backends.base import Backend, Runner, UnsupportedError
from benchmarks.problems import Problem

if TYPE_CHECKING:
    from torch import Tensor


class Sdpa(Backend):
    """FlashAttention-2, cuDNN or the memory-efficient kernels, as PyTorch brings them."""

    def __init__(self, name: str, kernel: str) -> None:
        """`kernel` is a member of `torch.nn.attention.SDPBackend`."""
        self.name, self._kernel = name, kernel

    def unavailable(self, device: str) -> str | None:
        """On a CPU there is PyTorch's own flash kernel alone."""
        if device == "cpu" and self._kernel != "FLASH_ATTENTION":
            return "for GPUs"
        return None

    def prepare(self, problem: Problem) -> Runner:
        """Views only; PyTorch allocates the output at each call. It has no windows: they are masks."""
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        backend = getattr(SDPBackend, self._kernel)
        q, k, v = problem.heads_first()
        causal, mask = problem.workload.causal, problem.mask
        if problem.workload.window:
            hidden = problem.hidden()
            assert hidden is not None and mask is None
            causal, mask = False, ~hidden[None, None]
        grouped = q.shape[1] != k.shape[1]

        def run() -> Tensor:
            with sdpa_kernel(backend):
                y = scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)
            return y.transpose(1, 2)

        with warnings.catch_warnings(record=True) as reasons:  # PyTorch warns why a backend does not fit, then raises
            warnings.simplefilter("always")
            try:
                run()
            except RuntimeError as error:
                raise UnsupportedError(_reason([str(w.message) for w in reasons]) or str(error)) from error
        return Runner(run, "its window is a mask" if problem.workload.window else "")


def _reason(messages: list[str]) -> str:
    """The last reason: the first lines name the backend, and others that were not asked for."""
    told = [m.partition(" (Triggered internally")[0] for m in messages if "not used because" not in m]
    told = [m for m in told if "runtime disabled" not in m]
    return told[0] if told else ""
