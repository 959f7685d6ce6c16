"""The fuzzer's caches and ragged batches: a slice of its problems every day, and proof that it finds faults."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any

import pytest
from flashonnx._capi import Library, Params
from fuzz import Fuzzer
from test_fuzz import Faulty, _add, _run

SEED = 2026


@pytest.mark.parametrize(("device", "count"), [("cpu", 200), pytest.param("cuda", 1500, marks=pytest.mark.gpu)])
def test_slice(library: Library, device: str, count: int) -> None:
    fuzzer = Fuzzer(device, SEED, "cache")
    kinds: Counter[str] = Counter()
    for index in range(count):
        try:
            kinds[fuzzer.check(index, library)] += 1
        except Exception as error:
            error.add_note(f"{fuzzer.describe(index)}\n  repeat with: {fuzzer.command(index)}")
            raise
    assert set(kinds) == {"CacheCase", "VarlenCase"}
    assert min(kinds.values()) > count / 10


def _no_table(params: Params) -> None:
    """Pages in the order in which they lie."""
    if params.block_table.dtype:
        params.block_table.stride[1] = 0


def _next_position(params: Params) -> None:
    if params.rotary_dim and not params.rotary_positions.dtype and params.rotary_length > 1:
        for table in (params.rotary_cos, params.rotary_sin):
            table.data += table.stride[0] * (4 if table.dtype == 1 else 2)
        params.rotary_length -= 1


def _pairs(params: Params) -> None:
    if params.rotary_dim > 2:
        params.rotary_interleaved ^= 1


def _last_sequence(params: Params) -> None:
    if params.cu_seqlens_q.dtype and params.batch:
        params.batch -= 1


def _one_query(params: Params) -> None:
    if params.cu_seqlens_q.dtype:
        params.kv_length = 1 if params.cache_k.dtype and params.k.dtype else params.kv_length
        params.q_length = 1


def _no_new_keys(params: Params) -> None:
    if params.cache_k.dtype:
        params.k.dtype = params.v.dtype = params.kv_length = 0


def _flip(name: str, offset: int) -> Any:
    """Turns the lowest bit of a byte of a tensor."""

    def change(params: Params) -> None:
        tensor = getattr(params, name)
        if tensor.dtype:
            ctypes.cast(tensor.data, ctypes.POINTER(ctypes.c_uint8))[offset] ^= 1

    return change


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "table": ({"before": _no_table}, "error|changed|out of place|zero|off by"),
    "position": ({"before": _next_position}, "off by|error"),
    "pairs": ({"before": _pairs}, "off by|error|changed, or were not"),
    "left window": ({"before": lambda p: _add("window_left", p.window_left >= 0)(p)}, "error|zero|out of place"),
    "right window": (
        {"before": lambda p: None if p.is_causal else setattr(p, "window_right", 0)},
        "error|zero|out of place",
    ),
    "softcap": ({"before": _add("softcap", 20.0)}, "error"),
    "causal": ({"before": lambda p: setattr(p, "is_causal", 1 - p.is_causal)}, "error|zero|out of place"),
    "last sequence": ({"before": _last_sequence}, "error|out of place|not written|off by"),
    "longest": ({"before": _one_query}, "error|out of place"),
    "nothing appended": ({"before": _no_new_keys}, "."),
    "a bit of the cache": ({"after": _flip("cache_k", 0)}, "changed|off by"),
    "a bit of the table": ({"after": _flip("block_table", 0)}, "block_table changed"),
    "a bit of the lengths": ({"after": _flip("cache_lengths", 0)}, "cache_lengths changed"),
    "before the cache": ({"after": _flip("cache_v", -1)}, "memory before the array was written"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(library_path: str, fault: str) -> None:
    """Within the first problems, with words that say what is wrong."""
    library = Faulty(library_path)
    changes, message = FAULTS[fault]
    library.before, library.after = changes.get("before"), changes.get("after")
    with pytest.raises(AssertionError, match=message):
        for index in range(100):
            Fuzzer("cpu", SEED, "cache").check(index, library)


def test_command() -> None:
    """Counts by operator; one problem alone, through ONNX Runtime."""
    done = _run("--seed", "3", "--count", "20", "--jobs", "2", "--through", "cache")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("20 of 20 problems of seed 3 on cpu through cache")
    assert "  CacheCase  " in done.stdout
    alone = _run("--seed", "3", "--only", "7", "--through", "cache-ort")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert "Case(id='3:7'" in alone.stdout
