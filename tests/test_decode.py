"""The kernel for few queries and many keys: its cases, which problems it takes, what may not change its results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cache_cases import CacheCase
from cache_seam import CacheProblem
from cases import Case
from cases_decode import CACHES, DECODE, VARLEN
from flashonnx._capi import CUDA, Device, Library
from seam import Buffer, Problem, address, current_stream
from varlen_cases import VarlenCase


def on_devices(*chosen: Any) -> Any:
    """Parametrises a test by (device, case)."""
    parameters = [
        pytest.param(device, case, id=f"{device}-{case.id}", marks=[] if device == "cpu" else pytest.mark.gpu)
        for case in chosen
        for device in ("cpu", "cuda")[getattr(case, "gpu", False) :]
    ]
    return pytest.mark.parametrize(("device", "case"), parameters)


@on_devices(*DECODE)
def test_case(library: Library, device: str, case: Case) -> None:
    Problem(library, case, device).check()


@on_devices(*CACHES)
def test_caches(library: Library, device: str, case: CacheCase) -> None:
    CacheProblem(library, case, device).check()


@on_devices(*VARLEN)
def test_ragged(library: Library, device: str, case: VarlenCase) -> None:
    inputs = case.inputs()
    case.check(inputs, case.run_seam(library, device, inputs))


@on_devices(
    *(c for c in DECODE if c.id in ("decode-q3-float16", "decode-mask-bhqk-T-bfloat16", "decode-d33-dv33-float16"))
)
def test_unaligned_memory(library: Library, device: str, case: Case) -> None:
    Problem(library, case, device, shift=1).check()


_REPEATED = [
    *(c for c in DECODE if c.id in ("decode-uneven-float16", "decode-mask-bhqk-T-bfloat16", "decode-nans-float16",
                                    "decode-uneven-units-lengths-float16", "decode-units-96-bfloat16",
                                    "decode-shares-nans")),
    *(c for c in CACHES if c.id in ("decode-pages-1-bfloat16", "decode-ragged-16-float16", "decode-pages-q5-float16",
                                    "decode-uneven-units-pages-16-float16", "decode-shares-pages-16")),
    # enough keys for more blocks than a cluster has
    Case("long", dtype="bfloat16", batch=1, heads=(16, 8), q_length=1, kv_length=17_000, head_dim=64, gpu=True),
    Case("many-heads", dtype="float16", batch=50, heads=(16, 8), q_length=2, kv_length=300, head_dim=64, is_causal=1),
]  # fmt: skip


@on_devices(*_REPEATED)
def test_runs_are_bit_equal(library: Library, device: str, case: Case | CacheCase) -> None:
    """Of a thousand; of five on the CPU."""
    problem = (CacheProblem if isinstance(case, CacheCase) else Problem)(library, case, device)  # type: ignore[arg-type]
    problem.check()
    first = {name: buffer.bytes + 0 for name, buffer in problem.outputs.items()}
    for i in range(1000 if device == "cuda" else 5):
        problem.launch()
        for name, buffer in problem.outputs.items():
            assert (buffer.bytes == first[name]).all(), f"{name} of run {i}"


_STEPS: dict[str, Any] = {
    "heads": (8, 2),
    "lengths": (1000, 3, 500, 127),
    "q_length": 1,
    "capacity": 1100,
    "in_place": True,
}


@on_devices(
    *(
        CacheCase(f"steps-{i}", dtype="float16", gpu=True, **(_STEPS | more))
        for i, more in enumerate(
            (
                {"head_dim": 128},
                {"head_dim": 64, "page_size": 16, "capacity": 1104, "rotary": "half"},
                {"head_dim": 64, "heads": (16, 8), "lengths": (1000, 3, 500, 127) * 6, "q_length": 2},
                {"head_dim": 128, "heads": (16, 8), "lengths": (3500, 0, 17, 900) * 3, "capacity": 3600},
            )
        )
    )
)
def test_steps_in_a_row(library: Library, device: str, case: CacheCase) -> None:
    """Steps whose kernels overlap give the bits of steps with a pause after each: lengths and keys are of their own."""
    import torch

    steps, names = 40, ("Q", "K", "V", "cache_lengths")
    random = np.random.default_rng(1)
    given = case.inputs()
    lengths = given["cache_lengths"] + case.q_length * np.arange(steps).reshape(-1, *[1] * given["cache_lengths"].ndim)
    new = {n: random.standard_normal((steps, *given[n].shape)).astype(given[n].dtype) for n in names[:3]}
    new["cache_lengths"] = lengths.astype(given["cache_lengths"].dtype)
    stacked = {n: Buffer(x.shape, x.dtype, device, array=x) for n, x in new.items()}
    found = []
    for pause in (True, False):
        problem = CacheProblem(library, case, device, inputs=given)
        workspace = Buffer((library.workspace(problem.params),), np.int8, device)
        outputs = Buffer((steps, *problem.outputs["Y"].shape), problem.outputs["Y"].dtype, device)
        for step in range(steps):
            for name in names:
                problem.inputs[name].view[...] = stacked[name].view[step]
            if pause and step == steps - 1:  # itself compared with the reference
                before = {n: x.numpy() for n, x in problem.inputs.items()}
                CacheProblem(library, case, device, inputs=before).check()
            library.run(problem.params, address(workspace.view), current_stream(device))
            outputs.view[step] = problem.outputs["Y"].view
            if pause:
                torch.cuda.synchronize()
        found.append([outputs.numpy(), *(problem.inputs[n].numpy() for n in ("key_cache", "value_cache"))])
    for paused, row in zip(*found, strict=True):
        assert paused.tobytes() == row.tobytes()


_MATES = Case("mates", dtype="float16", batch=6, heads=(8, 2), q_length=1, kv_length=3000, head_dim=64,
              lengths=(3, 3000, 0, 64, 2999, 1500), is_causal=1)  # fmt: skip


@on_devices(_MATES, replace(_MATES, id="mates-wide", dtype="bfloat16", q_length=4, head_dim=128, sinks=True))
def test_fixed_split_ignores_batch_mates(library: Library, device: str, case: Case) -> None:
    """Bit for bit, whoever else is in the batch and however long (flash-attention#1897)."""
    together = Problem(library, case, device)
    together.params.fixed_split = 1
    outputs = together.run()
    assert case.lengths
    for first, end in ((0, 1), (1, 2), (2, 3), (1, 4), (3, 6)):
        lengths = case.lengths[first:end]
        inputs = {name: x if name == "sinks" else x[first:end] for name, x in together.given.items()}
        fewer = Problem(library, replace(case, batch=end - first, lengths=lengths), device, inputs=inputs)
        fewer.params.fixed_split = 1
        for name, out in fewer.run().items():
            assert out.tobytes() == outputs[name][first:end].tobytes(), f"{name} of entries {first} to {end}"


def _on(arch: int, sm_count: int, shared_memory: int) -> Device:
    return Device(kind=CUDA, arch=arch, sm_count=sm_count, shared_memory=shared_memory)


_DEVICES = [_on(80, 108, 163 << 10), _on(86, 84, 99 << 10), _on(90, 132, 227 << 10), _on(120, 170, 99 << 10)]


def _described(library: Library, target: Device, **sizes: Any) -> Any:
    """A problem without data, for a device that need not be here."""
    case = Case(
        "described",
        dtype="float16",
        batch=1,
        heads=(8, 2),
        q_length=1,
        kv_length=1,
        head_dim=sizes.pop("head_dim", 128),
    )
    params = Problem(library, case).params
    params.device = target
    for name, value in sizes.items():
        setattr(params, name, value)
    return params


def _kernel(library: Library, params: Any) -> str:
    try:
        return library.supported(params)
    except NotImplementedError as error:
        pytest.skip(f"a library without CUDA kernels: {error}")


@pytest.mark.parametrize("target", _DEVICES, ids=lambda d: f"arch{d.arch}")
def test_chosen(library: Library, target: Device) -> None:
    """Few queries of many keys go to it, other problems do not."""
    for taken in (
        {"kv_length": 1024}, {"kv_length": 128, "batch": 300}, {"q_length": 4, "kv_length": 500},
        {"q_heads": 71, "kv_heads": 1, "kv_length": 300}, {"kv_length": 500, "head_dim": 256},
        {"q_heads": 32, "kv_heads": 8, "q_length": 48, "kv_length": 4096},
    ):  # fmt: skip
        assert _kernel(library, _described(library, target, **taken)) == "decode", taken
    for left in (
        {"kv_length": 20},
        {"q_length": 128, "kv_length": 500},
        {"q_length": 65, "kv_length": 5000},
        {"q_heads": 32, "kv_heads": 8, "q_length": 48, "kv_length": 4096, "fixed_split": 1},
        {"batch": 8, "q_heads": 32, "kv_heads": 8, "q_length": 64, "kv_length": 4096},
    ):
        assert _kernel(library, _described(library, target, **left)) != "decode", left


def test_keys_that_are_far_apart_are_left(library: Library) -> None:
    """It counts their places in 32 bits, of 16 bytes each, or of elements where rows are no whole vectors."""
    keys = 1000
    for row, taken in ((2**35 // keys, True), (2**35 // keys // 8 * 8 + 8, False), (2**32 // keys + 2, False)):
        params = _described(library, _DEVICES[2], kv_length=keys)
        params.k.stride[2] = row // 8 * 8 if taken else row
        assert (_kernel(library, params) == "decode") == taken, row


@pytest.mark.parametrize("target", _DEVICES, ids=lambda d: f"arch{d.arch}")
def test_workspace_bound_holds(library: Library, target: Device) -> None:
    """No problem needs more than was planned for the largest one: fewer keys heads are split more finely."""
    random = np.random.default_rng(7)
    largest = {"batch": 9, "q_heads": 32, "kv_heads": 8, "q_length": 5, "kv_length": 100_000}
    for fixed in (0, 1):
        maxima = _described(library, target, **largest, fixed_split=fixed)
        _kernel(library, maxima)
        bound = library.workspace_bound(maxima)
        for _ in range(200):
            sizes = {name: int(random.integers(1, most + 1)) for name, most in largest.items()}
            sizes["q_heads"] = sizes["kv_heads"] * int(random.integers(1, largest["q_heads"] // sizes["kv_heads"] + 1))
            smaller = _described(library, target, **sizes, fixed_split=fixed)
            assert library.workspace(smaller) <= bound, sizes
