"""The benchmarks on small problems: what is counted, who takes turns, who gets no time, what comes out. No speed."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compare
import numpy as np
import pytest
from flashonnx.reference import attention

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder is no part of the package
torch = pytest.importorskip("torch")

from benchmarks import backends, correctness, problems, timing, workloads  # noqa: E402
from benchmarks.backends.base import Backend, Runner, UnsupportedError  # noqa: E402
from benchmarks.correctness import Gate, WrongAnswerError  # noqa: E402
from benchmarks.environment import Ceilings, Environment  # noqa: E402
from benchmarks.measure import Contender, Settings, _launches, measure  # noqa: E402
from benchmarks.problems import Problem  # noqa: E402
from benchmarks.results import MEASURED, Row  # noqa: E402
from benchmarks.workloads import Workload  # noqa: E402

TINY = Workload("tiny", "models", "float32", 2, (4, 2), (9, 9), 16, causal=True)
WINDOWED = replace(TINY, name="windowed", window=3)
PADDED = Workload("padded", "models", "float32", 2, (2, 2), (5, 12), 8, mask="b11k")
BIASED = Workload("biased", "models", "float32", 2, (2, 2), (5, 12), 8, mask="11qk", mask_dtype="T")
STEP = Workload("step", "decode", "float32", 2, (4, 2), (1, 512), 16, cache=True)
HERE = Environment("2026-01-01T00:00:00Z", "abc", "a device", "1", "a=1")
CEILINGS = Ceilings(dict.fromkeys(("float32", "float16", "bfloat16"), 1e12), 1e9, "made up")
SETTINGS = Settings("cpu", budget=0.0)


class Stub(Backend):
    """Computes what it is told, and notes when it did."""

    def __init__(
        self, name: str, answer: Callable[[Any], Any], turns: list[str] | None = None, ours: bool = False
    ) -> None:
        self.name, self._answer, self._turns, self.ours = name, answer, turns, ours

    def unavailable(self, device: str) -> str | None:
        return None

    def prepare(self, problem: Problem) -> Runner:
        out = self._answer(truth(problem))

        def run() -> Any:
            if self._turns is not None:
                self._turns.append(self.name)
            return out

        return Runner(run, "stub")


def truth(problem: Problem) -> Any:
    """By the reference of the operator, which the benchmarks do not use."""
    q, k, v = (x.double().numpy() for x in problem.heads_first())
    mask = None if problem.mask is None else problem.mask.numpy()
    causal, left = problem.workload.causal, problem.workload.window - 1
    y = attention(q, k, v, mask, is_causal=causal, left_window_size=left)[0]
    return torch.from_numpy(np.ascontiguousarray(y.swapaxes(1, 2))).to(problem.q.dtype)


def by_backend(rows: list[Row]) -> dict[str, Row]:
    return {row.backend: row for row in rows}


def test_work_is_counted_by_hand() -> None:
    full = Workload("", "", "bfloat16", 8, (16, 16), (2048, 2048), 128)
    # Two products, 8 * 16 heads, 2048 * 2048 scores, 128 multiply-adds each: 274.88 GFLOP.
    assert full.flops == 2 * 2 * 8 * 16 * 2048 * 2048 * 128 == 274_877_906_944
    assert replace(full, causal=True).flops == 137_438_953_472
    assert full.bytes == 4 * (8 * 2048 * 16 * 128) * 2 == 268_435_456  # Q, K, V, Y, 64 MiB each
    grouped = Workload("", "", "float16", 1, (32, 8), (1, 4096), 128)
    assert grouped.flops == 4 * 32 * 4096 * 128
    assert grouped.bytes == 2 * (2 * 32 * 1 * 128 + 2 * 8 * 4096 * 128)
    assert replace(full, mask="b11k").bytes - full.bytes == 8 * 2048  # one byte a key
    assert replace(full, mask="11qk", mask_dtype="T").bytes - full.bytes == 2048 * 2048 * 2
    assert replace(PADDED, mask_dtype="T").bytes - replace(PADDED, mask="").bytes == 2 * 12 * 4
    assert PADDED.score_bytes == 2 * 2 * 5 * 12 * 4
    # 8192 queries of a window of 1024: 8192 * 1024 pairs without the triangle before the first window is full.
    band = replace(full, batch=1, lengths=(8192, 8192), causal=True, window=1024)
    assert band.flops == 4 * 16 * (8192 * 1024 - 1024 * 1024 // 2) * 128
    assert replace(band, window=8192).flops == replace(band, window=0).flops


def test_ceiling_is_the_longer_of_arithmetic_and_memory() -> None:
    h200 = Ceilings({"bfloat16": 790e12}, 4.3e12, "")
    short = Workload("", "", "bfloat16", 32, (16, 16), (512, 512), 128, causal=True)
    seconds, bound = h200.seconds(short)
    assert bound == "memory" and seconds == pytest.approx(268_435_456 / 4.3e12)
    assert short.flops / seconds / 1e12 == pytest.approx(550.4, abs=0.1)
    seconds, bound = h200.seconds(replace(short, batch=1, lengths=(16384, 16384)))
    assert bound == "arithmetic" and seconds == pytest.approx(4 * 16 * 16384**2 * 128 / 2 / 790e12)


def test_the_24_cells() -> None:
    cells = workloads.select(workloads.for_device("cuda"), "cells")
    assert len(cells) == 24
    for cell in cells:
        assert cell.batch * cell.lengths[0] == 16384 and cell.heads[0] * cell.head_dim == 2048
    assert {(c.head_dim, c.lengths[0], c.causal) for c in cells} == {
        (d, s, causal) for d in (64, 128, 256) for s in (512, 2048, 8192, 16384) for causal in (False, True)
    }
    every = [*workloads.for_device("cuda"), *workloads.for_device("cpu")]
    assert len({w.name for w in workloads.for_device("cuda")}) == len(workloads.for_device("cuda"))
    assert all(not w.causal or w.lengths[0] == w.lengths[1] for w in every)  # flops counts half of a square
    assert all(w.causal and not w.mask for w in every if w.window)


def test_selection() -> None:
    cuda = workloads.for_device("cuda")
    assert [w.name for w in workloads.select(cuda, "bert-base-*,d64-s512-full")] == [
        "d64-s512-full", "bert-base-b32-s128", "bert-base-b8-s512", "bert-base-b8-s512-padded",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no workload or group is called 'nothing'"):
        workloads.select(cuda, "cells,nothing")
    assert [b.name for b in backends.select(backends.every(), "fa2, ours")] == ["ours", "FA2"]
    with pytest.raises(ValueError, match="there is no 'theirs', only ours, "):
        backends.select(backends.every(), "theirs")


@pytest.mark.parametrize("workload", [TINY, WINDOWED, PADDED, BIASED, replace(TINY, name="tiny16", dtype="float16")])
def test_gate_knows_the_right_answer(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problems.make(workload, "cpu")
    answer = truth(problem)
    whole = Gate(problem).check(answer)
    monkeypatch.setitem(correctness._SCORES, "cpu", 3 * workload.lengths[1])  # three queries at a time
    assert Gate(problem).check(answer) == pytest.approx(whole, rel=0.1)
    monkeypatch.setitem(correctness._SCORES, "cpu", 3 * workload.lengths[0] * workload.lengths[1])  # three heads
    assert Gate(problem).check(answer) == pytest.approx(whole, rel=0.1)
    assert whole[0] <= correctness.EPSILON[workload.dtype] * 2


def test_gate_compares_some_heads_of_a_large_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evenly spread ones, each right by the reference; NaN is found in all."""
    workload = Workload("", "", "float32", 2, (8, 2), (7, 9), 16)
    problem = problems.make(workload, "cpu")
    monkeypatch.setattr(correctness, "_MOST", 4 * 2 * 7 * 9)
    chosen = correctness._heads(problem)
    assert chosen == [0, 2, 4, 7]
    answer = truth(problem)
    Gate(problem).check(answer)
    for head in range(8):
        wrong = answer.clone()
        wrong[1, 6, head] += 0.1
        if head in chosen:
            with pytest.raises(WrongAnswerError):
                Gate(problem).check(wrong)
        wrong[1, 6, head, 3] = float("nan")
        with pytest.raises(WrongAnswerError, match="NaN"):
            Gate(problem).check(wrong)


def test_gate_is_the_rule_of_the_tests() -> None:
    assert correctness.EPSILON == compare.EPSILON
    half = {"float16": compare.FLOOR_ULPS, "bfloat16": compare.FLOOR_ULPS}
    assert correctness.FLOOR_ULPS.items() >= half.items()
    workload = replace(TINY, dtype="bfloat16", causal=False)
    problem = problems.make(workload, "cpu")
    _, allowed = Gate(problem).check(truth(problem))
    q, k, v = (x.float().numpy() for x in problem.heads_first())
    attributes = {"is_causal": 0, "left_window_size": -1, "right_window_size": -1, "softcap": 0.0, "empty_row": "zero"}
    attributes |= {"q_num_heads": None, "kv_num_heads": None, "qkv_layout": "separate", "scale": None}
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    naive, _, _ = compare.naive_attention(
        dict(zip("QKV", (x.astype(dtype) for x in (q, k, v)), strict=True)), attributes
    )
    ref = attention(q, k, v)[0]
    plain = (np.abs(naive - ref) / np.maximum(np.abs(ref), 1)).max()
    assert allowed == pytest.approx(2 * plain + 4 * 2**-7 * min(1, np.abs(ref).max()), rel=1e-3)


@pytest.mark.parametrize("wrong", ["off", "nan", "transposed", "unwritten row", "no mask", "tf32"])
def test_gate_refuses(wrong: str) -> None:
    workload = Workload("w", "", "float32", 2, (2, 2), (64, 256), 32, mask="b11k")
    problem = problems.make(workload, "cpu")
    answer = truth(problem)
    match wrong:
        case "off":
            answer[1, 3, 1, 5] += 1e-5
        case "nan":
            answer[0, 0, 0, 0] = float("nan")
        case "transposed":
            answer = answer.transpose(1, 2)
        case "unwritten row":
            answer[1, 63] = 0
        case "no mask":
            answer = truth(problem.without_mask())
        case "tf32":  # 10 bits of Q and K
            kept = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (problem.q, problem.k)]
            answer = truth(replace(problem, q=kept[0], k=kept[1]))
    with pytest.raises(WrongAnswerError):
        Gate(problem).check(answer)


def test_a_liar_gets_no_time() -> None:
    honest = Stub("ours", lambda y: y, ours=True)
    liars = [Stub("zeros", torch.zeros_like), Stub("nearly", lambda y: y + 1e-4), Stub("short", lambda y: y[:, 1:])]
    rows = by_backend(measure(TINY, [honest, *liars], SETTINGS, HERE, CEILINGS))
    assert rows["ours"].status == MEASURED and rows["ours"].median_ms and rows["ours"].best_peer == ""
    for liar in liars:
        row = rows[liar.name]
        assert row.status.startswith("WrongAnswerError: wrong")
        assert (row.median_ms, row.tflops, row.rounds, row.ratio_to_best_peer) == (None, None, None, None)


def test_who_is_right_at_first_alone_gets_no_time_either() -> None:
    """A race may spare the first run."""

    class Racing(Stub):
        def prepare(self, problem: Problem) -> Runner:
            out, runs = truth(problem), []

            def run() -> Any:
                runs.append(1)
                if len(runs) > 1:
                    out[0, 0, 0, 0] += 1
                return out

            return Runner(run)

    rows = by_backend(
        measure(TINY, [Stub("ours", lambda y: y, ours=True), Racing("racing", lambda y: y)], SETTINGS, HERE, CEILINGS)
    )
    assert rows["racing"].status.startswith("WrongAnswerError") and rows["racing"].median_ms is None
    assert rows["ours"].best_peer == ""


def test_reasons_are_kept() -> None:
    def refuse(_: Any) -> Any:
        raise UnsupportedError("it is Sunday")

    def fail(_: Any) -> Any:
        raise OSError("no such device\nsecond line")

    contenders = [Stub("sunday", refuse), Stub("broken", fail), Stub("absent", lambda y: y)]
    rows = measure(TINY, contenders, SETTINGS, HERE, CEILINGS, {"absent": "not installed"})
    assert [row.status for row in rows] == ["unsupported: it is Sunday", "OSError: no such device", "not installed"]


def test_turns_are_taken() -> None:
    turns: list[str] = []
    contenders = [Stub(name, lambda y: y, turns) for name in "ABC"]
    rows = measure(TINY, contenders, SETTINGS, HERE, CEILINGS)
    rounds = rows[0].rounds
    assert rounds == timing.FEWEST and [row.rounds for row in rows] == [rounds] * 3
    assert "".join(turns[-3 * rounds :]) == "ABC" * rounds


def test_interleaving_with_a_made_up_clock() -> None:
    class Made:
        def __init__(self) -> None:
            self.now, self.waited = 0.0, False

        def time(self, call: Callable[[], object]) -> Callable[[], float]:
            self.now += 1
            then = self.now
            call()

            def seconds() -> float:
                assert self.waited
                return then

            return seconds

        def wait(self) -> None:
            order.append("wait")
            self.waited = True

    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    times = timing.interleave(calls, Made(), 3, lambda: order.append("look"))
    assert order == ["a", "b", "a", "b", "a", "b", "look", "wait"]
    assert times == {"a": [1, 3, 5], "b": [2, 4, 6]}


def test_statistics_of_made_up_times() -> None:
    assert timing.spread([5, 1, 3, 2, 4]) == (3, 2, 4)
    assert timing.spread([7]) == (7, 7, 7)
    # Rounds drift, the pairs do not: the ratio of the medians would be 0.5.
    assert timing.paired_ratio([3, 10, 100], [1, 20, 50]) == 2
    assert timing.rounds_for([0.01, 0.03], budget=0.2) == 10
    assert timing.rounds_for([1.0], budget=0.1) == timing.FEWEST
    assert timing.rounds_for([1e-9], budget=1.0) == timing.MOST
    assert timing.rounds_for([], budget=1.0) == timing.FEWEST


def test_ratios_and_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"ours": [1e-3, 2e-3, 4e-3], "near": [2e-3, 2e-3, 6e-3], "far": [9e-3, 9e-3, 9e-3]}
    monkeypatch.setattr(timing, "interleave", lambda calls, *_: {name: made[name] for name in calls})
    contenders = [Stub(name, lambda y: y, ours=name == "ours") for name in made]
    rows = by_backend(measure(TINY, contenders, SETTINGS, HERE, CEILINGS))
    assert {row.best_peer for row in rows.values()} == {"near"}
    assert rows["ours"].median_ms == pytest.approx(2)
    assert rows["ours"].ratio_to_best_peer == pytest.approx(1.5)  # of 2, 1, 1.5
    assert rows["near"].ours_speedup == pytest.approx(1.5)
    assert rows["far"].ratio_to_best_peer == pytest.approx(2 / 9)
    assert rows["ours"].tflops == pytest.approx(TINY.flops / 2e-3 / 1e12)
    assert rows["ours"].gbps == pytest.approx(TINY.bytes / 2e-3 / 1e9)
    assert rows["ours"].share_of_ceiling == pytest.approx(max(TINY.flops / 1e12, TINY.bytes / 1e9) / 2e-3)


@pytest.mark.parametrize(
    "workload",
    [TINY, WINDOWED, PADDED, BIASED, replace(BIASED, name="odd", mask="b11k"), STEP],
    ids=lambda w: w.name,
)
def test_every_backend_here_is_right(workload: Workload) -> None:
    """Each form of model, and PyTorch: no wrong answer, and a time or a reason that we know of."""
    chosen = backends.every()
    reasons = {b.name: reason for b in chosen if (reason := b.unavailable("cpu"))}
    rows = measure(workload, chosen, SETTINGS, HERE, CEILINGS, reasons)
    not_measured = {row.backend for row in rows if row.status != MEASURED} - set(reasons)
    expected = {"ORT-MHA"} if workload.heads[0] != workload.heads[1] else {"ORT-GQA"}
    if workload.cache:
        expected |= {"ORT-paged"}  # for GPUs alone
        assert {"ours-step", "ours-pages-16", "ORT-ours-pages"} <= {row.backend for row in rows}
    assert not_measured == expected, [row.status for row in rows]
    assert {"ours", "ORT-ours", "ORT-Attention", "ORT-unfused"} <= {row.backend for row in rows}
    assert ("ours-unmasked" in {row.backend for row in rows}) == bool(workload.mask)


def test_copies_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that take copies in turn have them all, whatever a runner holds on to."""
    seen: list[weakref.ref[torch.Tensor]] = []

    class Forgetful(Backend):
        name = "forgetful"

        def unavailable(self, device: str) -> str | None:
            return None

        def prepare(self, problem: Problem) -> Runner:
            seen.append(weakref.ref(problem.q))
            out = problem.new_output()
            return Runner(lambda: out)

    workload = replace(TINY, launches=4, copies=3)
    backend, problem = Forgetful(), problems.make(workload, "cpu")
    contender = Contender(backend, runner=backend.prepare(problem))
    call = _launches(contender, problem)
    del problem
    gc.collect()
    assert len(seen) == 3 and all(tensor() is not None for tensor in seen)
    call()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    replay, _ = timing.capture(call)
    del call
    gc.collect()
    assert all(tensor() is not None for tensor in seen)  # as long as the graph may be replayed
    replay()
