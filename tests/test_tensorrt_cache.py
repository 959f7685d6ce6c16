"""FlashAttentionKVCache and FlashAttentionVarlen as TensorRT plugins: by the host in C++, and in TensorRT's parser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cache_cases
import cache_nodes
import onnx
import pytest
import varlen_cases
from cache_cases import CacheCase
from cache_seam import check_cache_outputs
from flashonnx.tensorrt import prepare_for_tensorrt
from nodes import DOMAIN
from test_tensorrt import _TYPES, drive, environment, save  # noqa: F401 - environment is a fixture
from trt_host import Host, Job, Shapes, find_program
from trt_models import attributes_of
from varlen_cases import VarlenCase

_CASES = [*cache_cases.ALL, *varlen_cases.ALL]


@pytest.fixture(scope="module")
def host(library_path: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Host]:
    tight = request.config.getoption("--tight")
    host = Host(find_program(library_path), library_path, tmp_path_factory.mktemp("host"), tight=tight)
    yield host
    host.close()


def model_of(case: CacheCase | VarlenCase, **attributes: Any) -> onnx.ModelProto:
    """One node."""
    if isinstance(case, VarlenCase):
        return case.node(case.inputs())
    return cache_nodes.one_node(case, case.inputs(), **attributes)


def asked_for(case: CacheCase | VarlenCase) -> list[str]:
    """The outputs of the node."""
    if isinstance(case, VarlenCase):
        return ["Y", "lse"] if case.lse else ["Y"]
    return [name for name in cache_nodes.asked_for(case) if name]


def job_of(*variants: CacheCase | VarlenCase) -> Job:
    """The first case's node, on the shapes of all."""
    job = Job({})
    for case in variants:
        (node,) = (n for n in prepare_for_tensorrt(model_of(case)).graph.node if n.domain == DOMAIN)
        job.operator, job.fields = node.op_type, attributes_of(node)
        arrays = [x.astype("int32") if x.dtype == bool else x for x in case.inputs().values()]
        shapes = case.output_shapes()
        outputs = [("float32" if name == "lse" else case.dtype, shapes[name]) for name in asked_for(case)]
        job.shapes.append(Shapes([(x.dtype.name, x.shape) for x in arrays], outputs, arrays))
    return job


def larger(case: CacheCase | VarlenCase) -> CacheCase | VarlenCase:
    """The same node on other shapes: one sequence more."""
    name = f"{case.id}+1"
    if isinstance(case, VarlenCase):
        more = None if case.q_tokens is None else case.q_tokens + 2
        k_ends = None if case.k_ends is None else (*case.k_ends, case.k_ends[-1])
        return replace(case, id=name, q_ends=(*case.q_ends, case.q_ends[-1] + 2), q_tokens=more, k_ends=k_ends)
    ragged = None if case.ragged is None else (*case.ragged, 2)
    return replace(case, id=name, lengths=(*case.lengths, min(7, case.capacity)), ragged=ragged)


_GIVEN = {
    "FlashAttentionKVCache": {
        "is_causal": 0, "q_num_heads": 6, "kv_num_heads": 2, "scale": 0.1875, "softcap": 2.5, "left_window_size": 9,
        "right_window_size": 0, "rotary_interleaved": 1, "rotary_dim": 16, "fixed_split": 1, "max_q_length": 70,
        "qkv_layout": "separate",
        "inputs": "Q,K,V,key_cache,value_cache,cache_lengths,cu_seqlens_q,cos_cache,sin_cache",
        "outputs": "Y,present_key_cache,present_value_cache,lse",
    },
    "FlashAttentionVarlen": {
        "is_causal": 1, "q_num_heads": 6, "kv_num_heads": 2, "scale": 0.1875, "softcap": 2.5, "left_window_size": 9,
        "right_window_size": 0, "fixed_split": 1, "max_q_length": 70, "max_kv_length": 90,
        "inputs": "Q,K,V,cu_seqlens_q,cu_seqlens_k,sinks", "outputs": "Y,lse",
    },
}  # fmt: skip


_PACKED = {"qkv_layout": "gqa", "inputs": "Q,key_cache,value_cache,cache_lengths,cu_seqlens_q,cos_cache,sin_cache"}


@pytest.mark.parametrize(("operator", "more"), [*((name, {}) for name in _GIVEN), ("FlashAttentionKVCache", _PACKED)])
def test_fields_survive_serialization(host: Host, operator: str, more: dict[str, str]) -> None:
    given = _GIVEN[operator] | more
    result = host.do(Job(given, operator=operator))[0]
    assert result.fields == given | {"planned_workspace": -1}


@pytest.mark.parametrize(("operator", "causal"), [("FlashAttentionKVCache", 1), ("FlashAttentionVarlen", 0)])
def test_defaults(host: Host, operator: str, causal: int) -> None:
    outputs = {"outputs": "Y,present_key_cache,present_value_cache"} if causal else {}
    result = host.do(Job(outputs, operator=operator))[0]
    assert result.fields["is_causal"] == causal
    assert {"scale", "q_num_heads", "empty_row"}.isdisjoint(result.fields)
    assert result.fields.get("qkv_layout") == ("separate" if causal else None)


@pytest.mark.parametrize(
    ("operator", "wrong", "reason"),
    [
        ("FlashAttentionKVCache", {"inputs": "Q,K,V,key_cache,value_cache"}, 'contain "key_cache"'),
        ("FlashAttentionKVCache", {"inputs": "Q,K,key_cache,value_cache,cache_lengths"}, '"K" and "V" together'),
        (
            "FlashAttentionKVCache",
            {"qkv_layout": "gqa", "inputs": "Q,K,V,key_cache,value_cache,cache_lengths"},
            'without "K" and "V": Q packs them',
        ),
        ("FlashAttentionKVCache", _PACKED | {"outputs": "Y"}, 'contain "present_key_cache"'),
        ("FlashAttentionKVCache", {"outputs": "Y"}, 'contain "present_key_cache" and "present_value_cache"'),
        ("FlashAttentionKVCache", {"outputs": "Y,present_key_cache"}, 'contain "present_key_cache" and'),
        (
            "FlashAttentionKVCache",
            {"inputs": "Q,K,V,key_cache,value_cache,cache_lengths,cos_cache"},
            '"cos_cache" and "sin_cache" together',
        ),
        ("FlashAttentionKVCache", {"rotary_dim": 3}, "attribute 'rotary_dim' is expected"),
        ("FlashAttentionVarlen", {"inputs": "Q,K,V"}, 'contain "K", "V" and "cu_seqlens_q"'),
        ("FlashAttentionVarlen", {"inputs": "Q,K,V,cu_seqlens_q,attn_mask"}, "distinct names"),
        ("FlashAttentionVarlen", {"max_kv_length": -1}, "attribute 'max_kv_length' is expected"),
    ],
    ids=str,
)
def test_creator_refuses(host: Host, operator: str, wrong: dict[str, Any], reason: str) -> None:
    failure = host.do(Job(_GIVEN[operator] | wrong, operator=operator))[0].failure
    assert failure.startswith("refused by the creator: FlashAttention: ")
    assert reason in failure


def test_every_case_is_built(host: Host) -> None:
    """Types, shapes, formats and a plan; restored exactly."""
    for case in _CASES:
        result, _ = host.do(job_of(case, larger(case)))
        assert not result.failure, (case.id, result.failure)
        assert result.fields["planned_workspace"] == max(result.workspaces), case.id


@pytest.mark.gpu
@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.id)
def test_enqueue(host: Host, case: CacheCase | VarlenCase) -> None:
    """The whole way of a plugin: two sets of shapes, compared with the reference."""
    variants = (case, larger(case))
    job = job_of(*variants)
    result, data = host.do(job, gpu=True)
    assert not result.failure
    for variant, shapes in zip(variants, job.shapes, strict=True):
        outputs, data = shapes.read(data)
        found = dict(zip(asked_for(variant), outputs, strict=True))
        if isinstance(variant, VarlenCase):
            variant.check(variant.inputs(), found)
        else:
            check_cache_outputs(variant, variant.inputs(), found)
    assert not data


def test_every_case_is_parsed(tmp_path: Path, environment: dict[str, str]) -> None:  # noqa: F811
    """Types and shapes that TensorRT infers, against the operators'."""
    models = [prepare_for_tensorrt(model_of(case)) for case in _CASES]
    jobs = [{"model": save(model, tmp_path, str(i))} for i, model in enumerate(models)]
    for case, result in zip(_CASES, drive(environment, jobs), strict=True):
        assert result["parsed"], (case.id, result["log"])
        assert result["layers"].count("PLUGIN_V3") == 1, case.id
        expected = {
            name: ["FLOAT" if name == "lse" else _TYPES[case.dtype], list(case.output_shapes()[name])]
            for name in asked_for(case)
        }
        assert {name: result["tensors"][name] for name in expected} == expected, case.id
