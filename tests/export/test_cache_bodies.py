"""FlashAttentionKVCache without the library: its bodies in ONNX Runtime against the definition in float64."""

from __future__ import annotations

import cache_cases
import onnxruntime as ort
import pytest
from cache_cases import CacheCase
from cache_nodes import one_node, run
from cache_seam import check_cache_outputs
from flashonnx.export import fuse, unfuse
from models import nodes

# Batches and caches without any element are for the library: GatherND has no row to take there.
_EMPTY = {"no-batch", "no-tokens", "no-capacity", "packed-no-tokens"}
CASES = [
    case
    for case in cache_cases.ALL
    if not case.page_size and case.ragged is None and case.dtype != "bfloat16" and case.id not in _EMPTY
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: CacheCase) -> None:
    inputs = case.inputs()
    model, report = fuse(one_node(case, inputs))
    assert report.fused == 1 and not report.notes, str(report)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    check_cache_outputs(case, inputs, run(session, case, inputs))


@pytest.mark.parametrize("opset", [13, 17, 23])
def test_opsets(opset: int) -> None:
    case = CacheCase("opsets", rotary="interleaved", mask="b1qk", softcap=2.0, left=3)
    inputs = case.inputs()
    before = one_node(case, inputs)
    before.opset_import[0].version = opset
    before.ir_version = min(before.ir_version, 10)
    model, _ = fuse(before)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    check_cache_outputs(case, inputs, run(session, case, inputs))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (CacheCase("paged", page_size=8), "block_table"),
        (CacheCase("ragged", ragged=(2, 3)), "cu_seqlens_q"),
    ],
)
def test_what_has_no_body(case: CacheCase, words: str) -> None:
    """Pages and packed tokens: the node stays, and the report says why it needs the library."""
    before = one_node(case, case.inputs())
    model, report = fuse(before)
    assert report.fused == 1 and not model.functions
    assert words in report.notes[0]
    kept, report = unfuse(before)
    assert nodes(kept) and words in report.sites[0].reason
