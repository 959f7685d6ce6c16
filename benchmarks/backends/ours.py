"""flashonnx's kernels through the C seam."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.backends.base import Backend, Runner, UnsupportedError
from benchmarks.problems import Problem
from benchmarks.workloads import Workload

if TYPE_CHECKING:
    from torch import Tensor


class Ours(Backend):
    """The kernel that the selector takes, or would take on an older GPU."""

    ours = True

    def __init__(self, name: str = "ours", *, arch: int | None = None, masked: bool = True) -> None:
        """Either the plain one, or a variant.

        Args:
            name: of the backend.
            arch: the compute capability times 10 that the selector is told, to have another kernel than the best.
            masked: False to leave the mask out: what a mask costs is seen by comparison.
        """
        self.name, self._arch, self._masked = name, arch, masked

    def unavailable(self, device: str) -> str | None:
        """No library, no device, or (for a variant) not on a CPU."""
        from flashonnx._capi import CPU, CUDA, Library
        from flashonnx._library import LibraryError, library_path

        if device == "cpu" and self._arch is not None:
            return "for GPUs"
        try:
            Library(library_path()).device(CUDA if device == "cuda" else CPU)
        except (LibraryError, OSError, RuntimeError, NotImplementedError) as error:
            return str(error)
        return None

    def concerns(self, workload: Workload) -> bool:
        """The variant without a mask only where there is one."""
        return self._masked or bool(workload.mask)

    def problem(self, problem: Problem) -> Problem:
        """Without its mask, for that variant."""
        return problem if self._masked else problem.without_mask()

    def prepare(self, problem: Problem) -> Runner:
        """Plans through the seam; output and workspace are allocated here."""
        import torch
        from flashonnx._capi import CPU, CUDA, Library, attention_params
        from flashonnx._library import library_path

        library = Library(library_path())
        on_gpu = problem.device == "cuda"
        device = library.device(CUDA if on_gpu else CPU)
        out = problem.new_output()
        q, k, v = problem.heads_first()
        causal, left = problem.workload.causal, problem.workload.window - 1
        params = attention_params(
            library, device, q, k, v, out.transpose(1, 2), mask=problem.mask, is_causal=causal, window_left=left
        )
        kernel = library.supported(params)
        if self._arch is not None:
            params.device.arch = min(self._arch, device.arch)
            best, kernel = kernel, library.supported(params)
            if kernel == best:
                raise UnsupportedError(f"ours is {best} already")
        workspace = torch.empty(max(1, library.workspace(params)), dtype=torch.uint8, device=problem.device)

        def run() -> Tensor:
            stream = torch.cuda.current_stream().cuda_stream if on_gpu else 0
            library.run(params, workspace.data_ptr(), stream)
            return out

        return Runner(run, kernel, allocated=out.nbytes + workspace.nbytes)
