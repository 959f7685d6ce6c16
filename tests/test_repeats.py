"""The same problem again: a thousand times, on threads, replayed by a CUDA graph."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import cases
import pytest
from cases import Case
from flashonnx._capi import Library
from seam import Buffer, Problem, check_outputs
from test_kernels import on_devices

_BY_ID = {case.id: case for case in cases.ALL}
_SPLIT = Case(
    "split", heads=(8, 2), q_length=1, kv_length=5000, head_dim=64, lengths=(5000, 17), is_causal=1, batch=2, gpu=True
)
# Of each kernel: tile shapes, many and few blocks, masks that are read in different ways, split keys and whole ones.
_REPEATED = [
    *(
        replace(_BY_ID[f"d{d}-float16"], id=f"d{d}-float16", q_length=130, kv_length=190)
        for d in (33, 96, 160, 256, 512)
    ),
    *(_BY_ID[i] for i in ("causal-d64-float16", "causal-d128-bfloat16", "s577-float32", "s577-bfloat16")),
    *(_BY_ID[i] for i in ("llama-decode-bfloat16", "gpt-oss-float16", "everything", "everything-float16")),
    *(_BY_ID[i] for i in ("lengths-float16", "mask-bhqk-T", "mask-bhqk-T-float16", "bert-float16", "softcap-bfloat16")),
    *(_BY_ID[i] for i in ("empty-row-1-mean", "empty-row-1-mean-float16", "poison-mask-nan-T-float16-cap0.5")),
    *(replace(_SPLIT, id=f"split-{dtype}", dtype=dtype) for dtype in ("float32", "float16")),
    replace(_SPLIT, id="split-mask-sinks", mask="b11k", sinks=True, dtype="bfloat16", is_causal=0),
    replace(_SPLIT, id="split-d512", head_dim=512, mask="b1qk", empty_row="mean", mask_fill="first row"),
]


@on_devices(*_REPEATED)
def test_runs_are_bit_equal(library: Library, device: str, case: Case) -> None:
    """Of the thousand, fewer on the CPU where one takes long; there whatever the number of threads."""
    problem = Problem(library, case, device)
    problem.check()
    first = {name: buffer.bytes + 0 for name, buffer in problem.outputs.items()}
    products = case.batch * case.heads[0] * case.q_length * case.keys * case.head_dim
    for i in range(1000 if device == "cuda" or products < 1e6 else 50):
        if device == "cpu":
            problem.params.device.sm_count = 1 + i % 7
        problem.launch()
        for name, buffer in problem.outputs.items():
            assert (buffer.bytes == first[name]).all(), f"{name} of run {i}"


def test_eight_threads(library: Library, device: str) -> None:
    """Different problems at once, each as if it were alone; on CUDA each on a stream of its own."""
    chosen = [
        _BY_ID[i] for i in ("d64-s128-float16", "causal-d128-float32", "d200-bfloat16", "everything", "s577-float16")
    ]
    if device == "cuda":
        chosen += [replace(_SPLIT, id="thread-split"), _BY_ID["mask-bhqk-T-float16"]]

    def work(index: int) -> None:
        for repeat in range(3):
            problem = Problem(library, chosen[(index + repeat) % len(chosen)], device)
            if device == "cpu":
                problem.check()
                continue
            import torch

            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                problem.check()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        _BY_ID["everything"],
        _BY_ID["everything-float16"],
        *(Case(f"lengths-{t}", dtype=t, kv_length=300, lengths=(300, 300), is_causal=1) for t in cases.DTYPES),
        *(replace(_SPLIT, id=f"split-{t}", dtype=t) for t in ("float32", "float16")),
    ],
    ids=lambda case: case.id,
)
def test_cuda_graph(library: Library, case: Case) -> None:
    """One capture, replayed over new inputs, and over lengths that change on the device."""
    import torch

    problem = Problem(library, case, "cuda")
    problem.check()  # loads the kernels, which a capture must not do
    workspace = torch.empty(library.workspace(problem.params), dtype=torch.int8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        library.run(problem.params, workspace.data_ptr(), torch.cuda.current_stream().cuda_stream)
    for i in range(4):
        lengths = None if case.lengths is None else (case.keys - 111 * i, 3 * i)
        given = replace(case, id=f"replay {i}", lengths=lengths).inputs()
        for name, x in given.items():
            problem.inputs[name].view.copy_(Buffer(x.shape, x.dtype, "cuda", array=x).view)
        for buffer in problem.outputs.values():
            buffer.bytes[...] = 255
        graph.replay()
        torch.cuda.synchronize()
        check_outputs(case, given, {name: buffer.numpy() for name, buffer in problem.outputs.items()})
