"""`flashonnx bench`: who is measured, who gets no time, what is written. No speed."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cli_driver import Command, flashonnx_command, plain, written_out
from flashonnx.cli._contenders import Contender, Operator, graph, operator_contenders, wrong
from flashonnx.cli._measure import Result, _reason, measure
from flashonnx.reference import attention

onnxruntime = pytest.importorskip("onnxruntime")
__all__ = ["flashonnx_command", "plain"]
QUICK = ("--budget", "0.001", "--device", "cpu")


def test_operations_are_counted_by_hand() -> None:
    problem = Operator(2, 4, 2, 16, "float32", False)
    assert problem.flops(10) == 4 * 2 * 4 * 10 * 10 * 16
    assert Operator(2, 4, 2, 16, "float32", True).flops(10) == 2 * 2 * 4 * 10 * 10 * 16


def truth(problem: Operator, length: int) -> Any:
    """(B, S, H D), by the reference of the operator, which the command does not use."""
    q, k, v = (
        x.astype(np.float64).reshape(problem.batch, length, -1, problem.size).swapaxes(1, 2)
        for x in problem.arrays(length).values()
    )
    y = attention(q, k, v, is_causal=problem.causal)[0]
    return y.swapaxes(1, 2).reshape(problem.batch, length, -1).astype(problem.dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("causal", [False, True])
def test_wrong_answers_are_seen(dtype: str, causal: bool) -> None:
    problem = Operator(2, 4, 2, 8, dtype, causal)
    right = truth(problem, 33)
    assert wrong(problem, 33, right) == ""
    spoilt = right.copy()
    spoilt[1, 32, 5] += 0.05
    assert "off by" in wrong(problem, 33, spoilt)
    assert "off by" in wrong(problem, 33, truth(Operator(2, 4, 2, 8, dtype, not causal), 33))
    spoilt[1, 32, 5] = np.nan
    assert wrong(problem, 33, spoilt)


@pytest.mark.parametrize("form", ["FlashAttention", "Attention", "unfused"])
@pytest.mark.parametrize("causal", [False, True])
def test_models_of_the_operator(form: str, causal: bool) -> None:
    """Each form computes the problem, grouped heads included."""
    import flashonnx

    problem = Operator(2, 4, 2, 8, "float32", causal)
    y = flashonnx.session(graph(problem, 9, form)).run(None, problem.arrays(9))[0]
    np.testing.assert_allclose(y, truth(problem, 9), atol=1e-5)
    assert wrong(problem, 9, y) == ""


class Stub(Contender):
    """Notes when it is called; fails from some length on."""

    def __init__(self, name: str, turns: list[str], fails_at: int = 10**9, ours: bool = False) -> None:
        self.closed = 0

        def opened(length: int) -> Callable[[], None]:
            if length >= fails_at:
                raise RuntimeError("too long\nby far")
            return lambda: turns.append(name)

        super().__init__(name, opened, ours, read=lambda: [name], close=self._close)

    def _close(self) -> None:
        self.closed += 1


def test_turns_and_failures() -> None:
    turns: list[str] = []
    stubs = [Stub("a", turns, ours=True), Stub("b", turns, fails_at=20), Stub("c", turns)]

    def judge(length: int, name: str, outputs: list[Any]) -> str:
        assert outputs == [name]
        return "wrong: a lot" if name == "c" and length == 10 else ""

    results = measure(stubs, [20, 10, 30], "cpu", 0.0, lambda n: 1e9 * n, judge)
    assert [(r.length, r.contender, r.status) for r in results] == [
        (10, "a", "measured"),
        (10, "b", "measured"),
        (10, "c", "wrong: a lot"),
        (20, "a", "measured"),
        (20, "b", "no: too long"),
        (30, "a", "measured"),
    ]
    assert all((r.median_ms is not None) == (r.status == "measured") for r in results)
    assert all(r.low_ms <= r.median_ms <= r.high_ms and r.rounds >= 3 for r in results if r.median_ms is not None)
    assert results[0].tflops == pytest.approx(1e9 * 10 / (results[0].median_ms or 1) * 1e3 / 1e12)
    assert turns[:5] == ["a", "b", "c", "a", "b"]  # the first call of each, then rounds of those that are in
    assert stubs[0].closed >= 3


def test_peak_memory_is_what_a_call_takes() -> None:
    class Hungry(Stub):
        def __init__(self) -> None:
            super().__init__("hungry", [])
            self.open = lambda length: lambda: np.ones(length << 20, np.uint8).sum()

    (result,) = measure([Hungry()], [64], "cpu", 0.0)
    if result.peak_bytes is None:
        pytest.skip("the system does not tell")
    assert 0.9 * (64 << 20) < result.peak_bytes < 2 * (64 << 20)


def test_the_table_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """With everybody on a GPU, long sequences and much memory."""
    from flashonnx.cli.bench import _tell

    problem = Operator(1, 16, 16, 128, "float16", False)
    names = [contender.name for contender in operator_contenders(problem, "cuda", 0)]
    numbers = {"median_ms": 1234.5678, "low_ms": 1.0, "high_ms": 2000.0, "tflops": 999.9, "peak_bytes": 17_300_000_000}
    results = [Result(name, length, **numbers) for length in (512, 131072) for name in names]
    _tell({"title": "", "environment": {}}, results)
    lines = capsys.readouterr().out.splitlines()[3:]
    assert len(lines) == 1 + len(results) and max(map(len, lines)) <= 80
    from flashonnx.cli import _figures

    colours = [*_figures._OTHERS, _figures._OURS, _figures._OURS_TOO]
    assert len(set(colours)) == len(colours) >= len(names), "each has its own"


def test_the_operator(flashonnx_command: Command) -> None:
    reports = [argument for kind in ("csv", "json") for argument in ("--report", kind)]
    shape = ("--lengths", "8,16", "--heads", "2", "--size", "8", "--peers", "unfused,ORT Attention")
    said = flashonnx_command("bench", *QUICK, *shape, *reports)
    assert "batch 1, 2 heads of 8, float32" in said and "peak memory" in said
    rows = list(csv.DictReader(Path("attention.bench.csv").read_text().splitlines()))
    assert [row["contender"] for row in rows] == 2 * ["flashonnx", "ORT Attention", "unfused"]
    assert all(row["status"] == "measured" and float(row["median_ms"]) > 0 for row in rows)
    content = json.loads(Path("attention.bench.json").read_text())
    assert [row["length"] for row in content["results"]] == 3 * [8] + 3 * [16]
    done = flashonnx_command.json("bench", *QUICK, *shape, "--causal", "--kv-heads", "1", "--batch", "2")
    assert done["title"] == "Attention: batch 2, 2 / 1 heads of 8, float32, causal"
    assert "ONNX Runtime" in done["environment"]


def test_a_model(plain: Path, flashonnx_command: Command) -> None:
    """Fused on the way or given; what varies is each dimension but the batch."""
    done = flashonnx_command.json("bench", plain, "--lengths", "5,9", "--batch", "3", *QUICK)
    assert done["title"] == "plain.onnx, by sequence at batch=3"
    assert {(r["contender"], r["length"], r["status"]) for r in done["results"]} == {
        (name, length, "measured") for name in ("fused", "original") for length in (5, 9)
    }
    flashonnx_command("fuse", plain, "-o", "fused.onnx")
    said = flashonnx_command("bench", plain, "fused.onnx", "--dim", "sequence=7", *QUICK)
    assert "plain.onnx, at batch=1, sequence=7" in said and "original" in said
    said = flashonnx_command("bench", plain, "--dim", "sequence=7", "--lengths", "8", *QUICK, code=2)
    assert "varies beside batch=1, sequence=7, so there is one length alone" in said
    assert "no input" in flashonnx_command("bench", plain, "--dim", "length=7", *QUICK, code=2)


def limited() -> onnx.ModelProto:
    """Attention over tokens with a table of 16 positions: it takes no more."""
    return onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20]>
        limited (float[batch, sequence, 8] x) => (float[batch, sequence, 8] y) {
            length = Shape<start = 1, end = 2>(x)
            zero = Constant<value_int = 0>()
            step = Constant<value_int = 1>()
            last = Squeeze(length)
            positions = Range(zero, last, step)
            shape = Constant<value_ints = [16, 8]>()
            table = ConstantOfShape(shape)
            position = Gather(table, positions)
            h = Add(x, position)
            t = Transpose<perm = [0, 2, 1]>(h)
            s = MatMul(h, t)
            p = Softmax<axis = -1>(s)
            y = MatMul(p, h)
        }""")


def test_lengths_beyond_the_limit_of_a_model(flashonnx_command: Command) -> None:
    """One line for both at the first of them, in whole words; 1 only if none was measured."""
    onnx.save(limited(), "limited.onnx")
    said = flashonnx_command("bench", "limited.onnx", "--lengths", "8,32,64", *QUICK)
    lines = [line for line in said.splitlines() if "no: " in line]
    assert len(lines) == 1 and lines[0].startswith("at length 32, original, fused: no: ")
    assert "Status" not in lines[0] and ".h:" not in lines[0]
    flashonnx_command("bench", "limited.onnx", "--lengths", "32", *QUICK, code=1)


def test_reasons_of_onnx_runtime_are_short() -> None:
    begin = (
        "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Add node. Name:'' Status Message: "
    )
    where = "/src/core/ops.h:583 void onnxruntime::Iterator::Append(ptrdiff_t, ptrdiff_t) "
    message = "axis == 1 was false. Attempting to broadcast an axis by a dimension other than 1. 16 by 32"
    assert _reason(RuntimeError(begin + where + message)) == f"no: Add: {message}"
    cut = _reason(RuntimeError("some words " * 50))
    assert len(cut) <= 170 and cut.endswith((" some …", " words …"))
    assert _reason(RuntimeError("")) == "no: RuntimeError"


def test_a_model_that_is_fused_already(plain: Path, flashonnx_command: Command) -> None:
    """It is measured beside its function bodies, which are no original."""
    flashonnx_command("fuse", plain, "-o", "fused.onnx")
    done = flashonnx_command.json("bench", "fused.onnx", "--lengths", "9", *QUICK)
    assert {(r["contender"], r["status"]) for r in done["results"]} == {
        ("fused", "measured"),
        ("function bodies", "measured"),
    }


def test_files_in_the_other_order(plain: Path, flashonnx_command: Command) -> None:
    """The names in the table would be wrong; verify judges by the first one's rounding, and says so."""
    flashonnx_command("fuse", plain, "-o", "fused.onnx")
    said = flashonnx_command("bench", "fused.onnx", plain, "--lengths", "9", *QUICK, code=2)
    assert f"fused.onnx has nodes of flashonnx and {plain} has none" in said
    assert "only the first model has nodes" in flashonnx_command("verify", "fused.onnx", plain)
    assert "only the first" not in flashonnx_command("verify", plain, "fused.onnx")


def test_a_model_of_fixed_shapes(flashonnx_command: Command) -> None:
    """It has no length, and asking for one, or for a batch, changes nothing: that is said, not passed over."""
    model = written_out()
    for value in (*model.graph.input, *model.graph.output):
        value.type.CopyFrom(onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, (2, 4, 8, 16)))
    onnx.save(model, "fixed.onnx")
    said = flashonnx_command("bench", "fixed.onnx", "--report", "html", *QUICK)
    assert "whose shapes are fixed" in said and "128" not in said.partition("length")[2]
    assert "at length" not in Path("fixed.bench.html").read_text()
    assert "no axis of an input" in flashonnx_command("bench", "fixed.onnx", "--lengths", "8", *QUICK, code=2)
    assert "have no batch" in flashonnx_command("bench", "fixed.onnx", "--batch", "8", *QUICK, code=2)


def test_packed_tokens_are_lengths(flashonnx_command: Command, library_path: str) -> None:
    """Not a batch, though they are the first axis; the batch is how many sequences end among them."""
    onnx.save(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20, "flashonnx" : 1]>
        g (float[tokens,32] x, int32[ends] cu_seqlens) => (float[tokens,32] y)
        { y = flashonnx.FlashAttentionVarlen<q_num_heads=4, kv_num_heads=4>(x, x, x, cu_seqlens) }"""),
        "packed.onnx",
    )
    told = flashonnx_command.json("bench", "packed.onnx", "packed.onnx", "--lengths", "8,16", "--batch", 3, *QUICK)
    assert told["title"] == "packed.onnx, by tokens"
    assert [r["length"] for r in told["results"] if r["contender"] == "fused" and r["median_ms"]] == [8, 16]


def test_a_mask_of_past_and_new_keys(flashonnx_command: Command) -> None:
    """Its axis has a name of its own, and is as long as both."""
    onnx.save(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 23]>
        g (int64[batch,new] input_ids, float[batch,total] attention_mask, float[batch,2,past,8] past_key)
          => (float[batch,2,t,8] y, float[batch,total] seen)
        {
            x0 = Gather(table, input_ids) x = Transpose<perm=[0,2,1,3]>(x0) keys = Concat<axis=2>(past_key, x)
            axes = Constant<value_ints=[1,2]>() m0 = Unsqueeze(attention_mask, axes) seen = Identity(attention_mask)
            kt = Transpose<perm=[0,1,3,2]>(keys)
            scores = MatMul(x, kt) masked = Add(scores, m0) p = Softmax<axis=-1>(masked) y = MatMul(p, keys) }"""),
        "past.onnx",
    )
    model = onnx.load("past.onnx")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((9, 2, 8), np.float32), "table"))
    onnx.save(model, "past.onnx")
    told = flashonnx_command.json("bench", "past.onnx", "--lengths", "8", *QUICK)
    assert told["title"] == "past.onnx, by new = past at batch=1"
    assert all(result["median_ms"] for result in told["results"]), told["results"]
    told = flashonnx_command.json("bench", "past.onnx", "--lengths", "8", "--dim", "new=1", *QUICK)
    assert told["title"] == "past.onnx, by past at batch=1, new=1"
    assert flashonnx_command.json("verify", "past.onnx", "past.onnx")["ok"]


def test_a_wrong_model_gets_no_time(plain: Path, flashonnx_command: Command) -> None:
    onnx.save(written_out(scale=3.0), "other.onnx")
    assert "other.onnx has no nodes" in flashonnx_command("bench", plain, "other.onnx", *QUICK, code=2)
    flashonnx_command("fuse", "other.onnx", "-o", "wrong.onnx")
    done = flashonnx_command.json("bench", plain, "wrong.onnx", "--lengths", "9", *QUICK, code=1)
    results = {r["contender"]: r for r in done["results"]}
    assert results["fused"]["status"].startswith("wrong: off by") and results["fused"]["median_ms"] is None
    assert results["original"]["status"] == "measured"


def test_a_model_without_fused_attention(flashonnx_command: Command) -> None:
    onnx.save(written_out(exposed=True), "exposed.onnx")
    said = flashonnx_command("bench", "exposed.onnx", "--lengths", "5", *QUICK, code=2)
    assert "no attention of exposed.onnx was fused" in said


def results() -> list[Result]:
    made = []
    for length in (64, 128, 256):
        made.append(Result("flashonnx", length, ours=True, median_ms=length / 64, low_ms=1.0, high_ms=2.0, tflops=0.1,
                           peak_bytes=length << 10))  # fmt: skip
        made.append(Result("unfused", length, median_ms=(length / 64) ** 2, low_ms=1.0, high_ms=2.0, tflops=0.05,
                           peak_bytes=length**2 << 4))  # fmt: skip
    return [*made, Result("ORT MultiHeadAttention", 64, "no: <unknown> type")]


@pytest.mark.parametrize(("low", "high"), [(5.1, 8.9), (0.04, 0.3), (2, 4000), (700, 90000)])
def test_logarithmic_axes_have_plain_numbers(low: float, high: float) -> None:
    pytest.importorskip("matplotlib")
    from flashonnx.cli._figures import _figure, _plain_numbers

    figure, axis = _figure((4, 3))
    axis.plot([1, 2], [low, high])
    axis.set_yscale("log")
    _plain_numbers(axis)
    figure.canvas.draw()
    labels = [label.get_text() for label in axis.get_yticklabels(which="both")]
    assert sum(low <= float(label) <= high for label in labels if label) >= 2  # a number, and one that is shown
    assert not any(sign in label for label in labels for sign in "e$^")


def test_reports(flashonnx_command: Command) -> None:
    pytest.importorskip("matplotlib")
    from flashonnx.cli._bench_page import page
    from flashonnx.cli._figures import growth

    content = {"title": "Attention: a & b", "environment": {"device": "a CPU"}}
    text = page(content, results())
    assert "4.00×" in text and "Attention: a &amp; b" in text and "&lt;unknown&gt;" in text
    assert 'src="data:image/png;base64,' in text
    assert not any(word in text for word in ("http://", "https://", "<script", "<link"))
    assert growth("t", results()).startswith(b"\x89PNG")
    assert growth("t", [r for r in results() if r.length == 64]).startswith(b"\x89PNG")


def test_options_of_the_other_kind(plain: Path, flashonnx_command: Command) -> None:
    """They would change nothing."""
    for option in (("--heads", 4), ("--kv-heads", 2), ("--size", 32), ("--dtype", "float16"), ("--causal",)):
        assert f"{option[0]} is of attention alone" in flashonnx_command("bench", plain, *option, *QUICK, code=2)
    assert "--dim is of a model" in flashonnx_command("bench", "--dim", "s=3", *QUICK, code=2)


def test_what_cannot_be_measured_is_said_first(plain: Path, flashonnx_command: Command) -> None:
    Path("junk.onnx").write_bytes(b"junk")
    for arguments, said in (
        ((plain, "missing.onnx"), "no ONNX model at 'missing.onnx'"),
        ((plain, "junk.onnx"), "'junk.onnx' is not an ONNX model"),
        (("missing.onnx",), "no ONNX model at 'missing.onnx'"),
    ):
        assert said in flashonnx_command("bench", *arguments, *QUICK, code=2)
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        said = flashonnx_command("bench", plain, *QUICK, "--device", "cuda", code=2)
        assert "--device cuda: nothing here can use a GPU" in said
    said = flashonnx_command("bench", "--size", "600", "--peers", "flashonnx", "--lengths", "8", *QUICK, code=1)
    assert "flashonnx: no: FlashAttention: kernel cpu does head dimensions up to 512, got 600" in said
