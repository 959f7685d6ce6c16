"""A workload's tensors: random, on a device, as every backend gets them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.workloads import Workload

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """A workload with its tensors; backends do not write to them."""

    workload: Workload
    q: Tensor  # (B, Sq, Hq, D), dense, as all of these are in some order
    k: Tensor  # (B, Sk, Hkv, D), of a cache's layout if the workload says so
    v: Tensor  # likewise
    mask: Tensor | None  # of rank 4, broadcast dimensions being 1

    @property
    def device(self) -> str:
        """The kind of device: "cpu" or "cuda"."""
        return self.q.device.type

    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V as (B, H, S, D) views."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)

    def hidden(self) -> Tensor | None:
        """(Sq, Sk): True where causality or the window hides a key; None without both."""
        import torch

        workload = self.workload
        if not workload.causal:
            return None
        queries, keys = (torch.arange(n, device=self.q.device) for n in workload.lengths)
        hidden = keys > queries[:, None]
        return hidden | (keys <= queries[:, None] - workload.window) if workload.window else hidden

    def new_output(self) -> Tensor:
        """(B, Sq, Hq, D), full of NaN: what a backend does not write is seen."""
        return self.q.new_full(self.q.shape, float("nan"))

    def elsewhere(self) -> Problem:
        """The same in other memory."""
        return replace(self, q=self.q.clone(), k=self.k.clone(), v=self.v.clone())

    def without_mask(self) -> Problem:
        """The same tensors, every key seen."""
        return replace(self, workload=replace(self.workload, mask=""), mask=None)


def make(workload: Workload, device: str) -> Problem:
    """Draws a workload's tensors, the same at every call: normal Q, K, V and bias; a bool mask hides the last keys."""
    import torch

    generator = torch.Generator(device).manual_seed(zlib.crc32(workload.name.encode()))
    dtype = getattr(torch, workload.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    (q_heads, kv_heads), (q_length, kv_length) = workload.heads, workload.lengths
    mask = None
    if workload.mask and workload.mask_dtype == "bool":
        # Few are hidden, so that a masked problem is as much work as the same without a mask.
        mask = torch.ones(workload.mask_shape, dtype=torch.bool, device=device)
        mask[..., -max(1, min(5, kv_length // 4)) :] = False
    elif workload.mask:
        mask = normal(*workload.mask_shape)

    def keys() -> Tensor:
        if workload.cache:
            return normal(workload.batch, kv_heads, kv_length, workload.head_dim).transpose(1, 2)
        return normal(workload.batch, kv_length, kv_heads, workload.head_dim)

    return Problem(workload, normal(workload.batch, q_length, q_heads, workload.head_dim), keys(), keys(), mask)
