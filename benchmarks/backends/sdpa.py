"""PyTorch's scaled_dot_product_attention, one of its backends at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashonnx.cli._contenders import told_why_not

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

        try:
            told_why_not(run)
        except RuntimeError as error:
            raise UnsupportedError(str(error)) from error
        return Runner(run, "its window is a mask" if problem.workload.window else "")
