"""The gate before the clock: an answer is compared with a float64 truth, and a wrong one gets no time.

The rule is that of the tests (`tests/compare.py`): max|out - ref| <= 2 max|plain - ref| + floor, where `plain` is
attention as one writes it down in the inputs' dtype. Here it is computed by PyTorch on the device, since problems are
too large for NumPy. Its products are a BLAS's, summed in blocks, and more exact than a kernel's sums in order over
thousands of keys, which the tests' plain computation does too: for float32 the floor makes up for that. TF32 would
still be off by far more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from benchmarks.problems import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
FLOOR_ULPS = {"float32": 16, "float16": 4, "bfloat16": 4}  # units in the last place: float32 of 1, else of the largest
_SCORES = {"cpu": 1 << 24, "cuda": 1 << 29}  # that stand in memory at a time
_MOST = 1 << 32  # scores that are computed; of larger problems some heads are compared, the first and the last included


class WrongAnswerError(Exception):
    """What a backend computed is not the attention that was asked for."""


class Gate:
    """The truth of one problem, and what plain attention makes of it."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def check(self, out: Tensor, rounds_scores: bool = False) -> tuple[float, float]:
        """The error of an answer, and the error that is allowed.

        Args:
            out: (B, Sq, Hq, D), what a backend computed.
            rounds_scores: the backend may round scores to the inputs' dtype, as unfused graphs do.

        Raises:
            WrongAnswerError: it has another shape, is not finite, or is off by more than that.
        """
        truth = self._truth
        if out.shape != self._problem.q.shape:
            raise WrongAnswerError(f"wrong shape {tuple(out.shape)}, expected {tuple(self._problem.q.shape)}")
        if not bool(out.isfinite().all()):
            raise WrongAnswerError(f"wrong answer: {int((~out.isfinite()).sum())} values are NaN or infinite")
        got = out[:, :, _heads(self._problem)].double()
        plain = self._rounded_error if rounds_scores else self._plain_error
        dtype = self._problem.workload.dtype
        unit = 1.0 if dtype == "float32" else min(1.0, float(truth.abs().max()))
        allowed = 2 * plain + FLOOR_ULPS[dtype] * EPSILON[dtype] * unit
        error = _error(got, truth)
        if error > allowed:
            raise WrongAnswerError(f"wrong answer: off by {error:.3g}, allowed {allowed:.3g}")
        return error, allowed

    @cached_property
    def _truth(self) -> Tensor:
        import torch

        return _attention(self._problem, torch.float64)

    @cached_property
    def _plain_error(self) -> float:
        import torch

        return _error(_attention(self._problem, torch.float32), self._truth)

    @cached_property
    def _rounded_error(self) -> float:
        import torch

        return _error(_attention(self._problem, torch.float32, rounds_scores=True), self._truth)


def _error(got: Tensor, truth: Tensor) -> float:
    """The largest difference; of values beyond 1 the relative one."""
    return float(((got.double() - truth).abs() / truth.abs().clamp(min=1)).max())


def _heads(problem: Problem) -> list[int]:
    """The query heads that are compared: all, or evenly spread ones."""
    batch, queries, heads, _ = problem.q.shape
    count = max(2, min(heads, _MOST // (batch * queries * problem.k.shape[1])))
    return list(range(heads)) if count >= heads else [i * (heads - 1) // (count - 1) for i in range(count)]


def _attention(problem: Problem, working: torch.dtype, rounds_scores: bool = False) -> Tensor:
    """Attention of `_heads`, (B, Sq, H, D), written out in float64, or in float32 that rounds as the inputs' dtype."""
    import torch

    exact = working is torch.float64
    dtype, structure = problem.q.dtype, problem.hidden()

    def rounded(x: Tensor, really: bool = True) -> Tensor:
        return x if exact or not really else x.to(dtype).to(working)

    chosen = _heads(problem)
    q, k, v = problem.heads_first()
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(problem.q[:, :, chosen], dtype=torch.float64 if exact else dtype)
    with torch.no_grad(), _full_float32():
        for batch, part, rows in _blocks(problem, len(chosen)):
            heads = chosen[part]
            keys, values = (x[batch, [head // group for head in heads]].to(working) for x in (k, v))
            scores = rounded(q[batch, heads, rows].to(working) @ keys.mT, rounds_scores)
            scores = rounded(scores / math.sqrt(q.shape[3]), rounds_scores)
            if problem.mask is not None:
                mask = problem.mask.expand(*q.shape[:3], k.shape[2])[batch, heads, rows]
                hidden = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(working)
                scores = rounded(hidden, rounds_scores)
            if structure is not None:
                scores = scores.masked_fill(structure[rows], -math.inf)
            y = rounded(torch.softmax(scores, dim=-1)) @ values
            out[batch, rows, part] = y.transpose(0, 1).to(out.dtype)
    return out


def _blocks(problem: Problem, heads: int) -> Iterator[tuple[int, slice, slice]]:
    """Batch entry, some of `heads` and queries at a time, so that the scores fit in memory."""
    batch, q_length, _, _ = problem.q.shape
    queries = max(1, min(q_length, _SCORES[problem.device] // problem.k.shape[1]))
    together = max(1, _SCORES[problem.device] // (problem.k.shape[1] * queries))
    for b in range(batch):
        for h in range(0, heads, together):
            for begin in range(0, q_length, queries):
                yield b, slice(h, h + together), slice(begin, begin + queries)


class _full_float32:  # noqa: N801 - a context
    """No TF32 in PyTorch's products meanwhile."""

    def __enter__(self) -> None:
        import torch

        self._before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False

    def __exit__(self, *_: object) -> None:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = self._before
