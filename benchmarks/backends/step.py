"""A step of generation through the C seam: the last key is appended, then all are attended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.backends.base import Backend, Runner
from benchmarks.backends.ours import Ours
from benchmarks.problems import Problem
from benchmarks.workloads import Workload

if TYPE_CHECKING:
    from torch import Tensor


class Step(Backend):
    """FlashAttentionKVCache's kernels, with a cache in one piece or in shuffled pages."""

    ours = True

    def __init__(self, name: str, page_size: int = 0) -> None:
        """`page_size` in slots; 0: one piece."""
        self.name, self._page_size = name, page_size

    def unavailable(self, device: str) -> str | None:
        """As for our other kernels."""
        return Ours().unavailable(device)

    def concerns(self, workload: Workload) -> bool:
        """Steps, whose queries are the last keys' tokens."""
        return workload.cache and not workload.mask

    def prepare(self, problem: Problem) -> Runner:
        """Takes the last keys out of the problem as new ones; they go where they came from."""
        import torch
        from flashonnx._capi import CPU, CUDA, Library
        from flashonnx._capi_cache import kv_cache_params
        from flashonnx._library import library_path

        library = Library(library_path())
        on_gpu, workload = problem.device == "cuda", problem.workload
        device = library.device(CUDA if on_gpu else CPU)
        tokens, keys = workload.lengths
        out = problem.new_output()
        new = [x[:, keys - tokens :].contiguous().transpose(1, 2) for x in (problem.k, problem.v)]
        caches, table = [x.transpose(1, 2).contiguous() for x in (problem.k, problem.v)], None
        if self._page_size:
            order, table = shuffled(workload.batch, keys, self._page_size, problem.device)
            caches = [paged(x, self._page_size, order) for x in (problem.k, problem.v)]
        before = torch.full((workload.batch,), keys - tokens, dtype=torch.int32, device=problem.device)
        params = kv_cache_params(
            library, device, problem.q.transpose(1, 2), *new, out.transpose(1, 2), *caches, before, block_table=table
        )
        kernel = library.supported(params)
        workspace = torch.empty(max(1, library.workspace(params)), dtype=torch.uint8, device=problem.device)
        held = (new, caches, table, before)

        def run(held: object = held) -> Tensor:  # the library knows addresses alone
            stream = torch.cuda.current_stream().cuda_stream if on_gpu else 0
            library.run(params, workspace.data_ptr(), stream)
            return out

        return Runner(run, kernel, allocated=out.nbytes + workspace.nbytes)


def shuffled(batch: int, keys: int, size: int, device: str) -> tuple[Tensor, Tensor]:
    """A page for each `size` keys of each sequence, in any order; the same as a block table."""
    import torch

    per = -(-keys // size)
    order = torch.randperm(batch * per, generator=torch.Generator().manual_seed(0)).to(device)
    return order, order.reshape(batch, per).to(torch.int32)


def paged(x: Tensor, size: int, order: Tensor) -> Tensor:
    """Keys or values (B, S, H, D) as pages (pages, size, H, D); slots past the last key are NaN."""
    batch, keys, *rest = x.shape
    whole = x.new_full((batch, len(order) // batch * size, *rest), float("nan"))
    whole[:, :keys] = x
    pages = whole.new_empty((len(order), size, *rest))
    pages[order] = whole.reshape(pages.shape)
    return pages
