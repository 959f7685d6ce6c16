"""FlashAttentionKVCache through the C seam, on the CPU and, where there is one, on a CUDA device."""

from __future__ import annotations

from typing import Any

import cache_cases
import pytest
from cache_cases import CacheCase
from cache_seam import CacheProblem
from flashonnx._capi import Library


def on_devices(*chosen: CacheCase) -> Any:
    """Parametrises a test by (device, case), each with its markers."""
    parameters = []
    for case in chosen:
        if not case.gpu:
            parameters.append(pytest.param("cpu", case, id=f"cpu-{case.id}"))
        parameters.append(pytest.param("cuda", case, id=f"cuda-{case.id}", marks=pytest.mark.gpu))
    return pytest.mark.parametrize(("device", "case"), parameters)


@on_devices(*cache_cases.ALL)
def test_case(library: Library, device: str, case: CacheCase) -> None:
    CacheProblem(library, case, device).check()
