"""Random problems that shrink to small ones: what `fuzz.py` draws, on kernels and through ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import draw
import pytest
from arranged import Arranged, Arrangement
from cases import Case
from flashonnx._capi import Library
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from nodes import one_node, open_session, run
from seam import check_outputs

T = TypeVar("T")
# The same examples every time, no clock; a failure prints the case, and pytest's command repeats it.
settings.register_profile(
    "everyday",
    deadline=None,
    derandomize=True,
    max_examples=150,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
EVERYDAY = settings.get_profile("everyday")


class Hypothesis:
    """A `draw.Draw` whose numbers hypothesis chooses."""

    def __init__(self, function: st.DrawFn) -> None:
        self._draw = function

    def integer(self, low: int, high: int) -> int:
        """Both ends included."""
        return self._draw(st.integers(low, high))

    def choice(self, options: Sequence[T]) -> T:
        """One of these."""
        return self._draw(st.sampled_from(options))

    def real(self, low: float, high: float) -> float:
        """A float32."""
        return self._draw(st.floats(low, high, width=32))


@st.composite
def arranged(function: st.DrawFn) -> tuple[Case, Arrangement]:
    """A problem in memory."""
    numbers = Hypothesis(function)
    case = draw.problem(numbers, "random", work=draw.LITTLE_WORK)
    return case, draw.arrange(numbers, case)


@st.composite
def nodes(function: st.DrawFn) -> Case:
    """A problem that a node can be, with a kernel."""
    case = draw.problem(Hypothesis(function), "random", node=True, work=draw.LITTLE_WORK)
    return case if not case.too_wide else draw.replace(case, head_dim=512, value_dim=None)


@given(problem=arranged())
@settings(EVERYDAY)
def test_kernel(library: Library, device: str, problem: tuple[Case, Arrangement]) -> None:
    note("\n".join(map(repr, problem)))
    Arranged(library, *problem, device=device).check()


@given(case=nodes())
@settings(EVERYDAY, max_examples=60)
def test_onnxruntime(device: str, case: Case) -> None:
    ort = pytest.importorskip("onnxruntime")
    if device == "cuda" and "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA")
    note(repr(case))
    inputs = case.inputs()
    check_outputs(case, inputs, run(open_session(one_node(case, inputs), device), case, inputs))
