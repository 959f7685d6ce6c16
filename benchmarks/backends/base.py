"""What a backend is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.problems import Problem
from benchmarks.workloads import Workload

if TYPE_CHECKING:
    from torch import Tensor


class UnsupportedError(Exception):
    """This backend does not do this workload; the message says why."""


@dataclass(frozen=True)
class Runner:
    """A problem, ready to be computed again and again."""

    run: Callable[[], Tensor]  # enqueues on PyTorch's current stream (CPU: computes); (B, Sq, Hq, D)
    kernel: str = ""  # what is known about how
    allocated: int = 0  # bytes of output and workspace that were allocated beforehand
    capturable: bool = True  # in a CUDA graph
    blocking: Callable[[], object] | None = None  # the same and waits, where users cannot do without a costly call


class Backend(ABC):
    """One way to compute attention."""

    name: str
    ours = False  # no peer of ours
    session = False  # an ONNX Runtime session
    rounds_scores = False  # may round scores to the inputs' dtype, which the gate then allows for

    @property
    def peer(self) -> bool:
        """Whether ours is compared with it."""
        return not self.ours

    @abstractmethod
    def unavailable(self, device: str) -> str | None:
        """Why it cannot be used here at all; None if it can."""

    def concerns(self, workload: Workload) -> bool:
        """Whether the workload says anything about it (else there is no row, not even one with a reason)."""
        return True

    def problem(self, problem: Problem) -> Problem:
        """What it computes instead, if it is not the problem itself."""
        return problem

    @abstractmethod
    def prepare(self, problem: Problem) -> Runner:
        """Allocates, builds and plans.

        Raises:
            Exception: it does not do this problem; UnsupportedError if it is known beforehand.
        """
