"""The benchmark of whole models, on tiny ones: graphs agree, weights are shared, what gets a time. No speed."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder is no part of the package
pytest.importorskip("torch")
for needed in ("transformers", "onnxruntime", "onnxscript", "sympy"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed", allow_module_level=True)

from benchmarks.end_to_end import decoder, graphs, measure, models, prepare, table, weights  # noqa: E402
from benchmarks.end_to_end.__main__ import main  # noqa: E402

OURS = {"plain", "ours", "ours-no-attention", "ours-on-ort", "ours-on-ort-no-attention"}
VARIANTS = {
    "tinybert-b2-s24": OURS | {"ort-attention", "ort-mha"},
    "tinyvit-b2": OURS | {"ort-attention", "ort-mha"},
    "tinyllama-s24": OURS | {"ort-gqa"},
}


@pytest.mark.parametrize(
    "name", ["tinyllama-s24", "tinybert-b2-s24", pytest.param("tinyvit-b2", marks=pytest.mark.slow)]
)
def test_prepare_and_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", str(tmp_path), "--only", name, "--no-weights"]) == 0
    assert {path.name.split(".")[1] for path in tmp_path.glob("*.onnx")} == VARIANTS[name]
    assert not list(tmp_path.glob("*.data"))
    output = tmp_path / "results.csv"
    command = ["run", str(tmp_path), "--output", str(output), "--device", "cpu", "--budget", "0", "--commit", "abc"]
    assert main(command) == 0
    with output.open(newline="") as file:
        rows = {row["variant"]: row for row in csv.DictReader(file) if row["median_ms"]}
    assert set(rows) == VARIANTS[name]
    for variant, row in rows.items():
        assert (
            row["subject"] == name and row["launch"] == "stream" and row["commit"] == "abc" and int(row["rounds"]) >= 5
        )
        assert float(row["low_ms"]) <= float(row["median_ms"]) <= float(row["high_ms"])
        if "no-attention" in variant:
            assert not row["error"] and not row["cpu_error"]
        else:
            assert float(row["error"]) < 3e-3  # two layers in float16, the same weights in all
    table.main([str(output)])
    assert f"| {name} |" in capsys.readouterr().out
    data = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.data")}
    assert len(data) == (0 if "vit" in name else 1)  # all of the ViT's are small
    assert main(command) == 0 and all(path.stat().st_mtime_ns == time for path, time in data.items())  # made once


def test_graphs_share_weights() -> None:
    subject = models.select("tinyllama-s24")[0]
    module = subject.module(values=False)
    places = weights.layout(module)
    offsets = {"model.model.embed_tokens.weight": "0", "model.lm_head.weight": "131072"}  # behind 128000 bytes
    for model in (graphs.plain(subject, module, places), decoder.build(subject, module, places)):
        outside = [p for p in model.graph.initializer if p.data_location == onnx.TensorProto.EXTERNAL]
        assert {p.name: list(p.dims) for p in outside} == dict(zip(offsets, ([1000, 64], [64, 1000]), strict=True))
        for proto in outside:
            assert {item.key: item.value for item in proto.external_data} == {
                "location": "tinyllama.2.float16.data", "offset": offsets[proto.name], "length": "128000",
            }  # fmt: skip


def test_turned_weights_are_written_turned(tmp_path: Path) -> None:
    import torch

    module = torch.nn.ModuleDict({"table": torch.nn.Embedding(300, 200), "linear": torch.nn.Linear(300, 200)})
    places = weights.layout(module.requires_grad_(False))
    assert places["linear.weight"].shape == (300, 200) and places["linear.weight"].turned
    assert places["linear.weight"].offset == 241664  # behind 240000 bytes, at a multiple of 4096
    weights.write(module, places, tmp_path / "w")
    content = (tmp_path / "w").read_bytes()
    linear = np.frombuffer(content[241664:], np.float32).reshape(300, 200)
    np.testing.assert_array_equal(linear, module["linear"].weight.numpy().T)
    np.testing.assert_array_equal(np.frombuffer(content[:240000], np.float32).reshape(300, 200), module["table"].weight)


@pytest.mark.parametrize("fault", ["scale", "angles"])
def test_a_wrong_graph_gets_no_time(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = decoder.build

    def wrong(*arguments: object) -> onnx.ModelProto:
        model = right(*arguments)  # type: ignore[arg-type]
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "scale" and fault == "scale":
                    attribute.f *= 1.02
        for proto in model.graph.initializer:
            if proto.name == "sines" and fault == "angles":
                proto.CopyFrom(onnx.numpy_helper.from_array(-onnx.numpy_helper.to_array(proto), proto.name))
        return model

    monkeypatch.setattr(decoder, "build", wrong)
    with pytest.raises(ArithmeticError, match=r"tinyllama-s24: (ort-gqa|ours-on-ort) differs from plain by"):
        prepare.check(models.select("tinyllama-s24")[0].small())


def test_distance() -> None:
    base = np.array([3.0, 4.0])
    assert prepare.distance(base + np.array([0.5, 0]), base) == pytest.approx(0.1)
    assert prepare.distance(np.array([3, np.nan]), base) == np.inf
    assert prepare.distance(base[:1], base) == np.inf


def test_speedup_is_of_pairs() -> None:
    results = [
        measure.Result("a", "", times=[1, 2, 4]),
        measure.Result("b", "", times=[2, 6, 8]),
        measure.Result("c", ""),
    ]
    assert measure.speedup(results, "a", "b") == 2
    assert measure.speedup(results, "a", "c") is None


def test_table(tmp_path: Path) -> None:
    """The best of each kind, and their ratios; a subject whose plain export did not run has none to it."""
    head = "subject,launch,variant,median_ms\n"
    a = "a,stream,plain,8\na,stream,plain+add,6\na,stream,ours,4\na,stream,ours-on-ort,2\na,stream,ort-mha,3\n"
    b = "b,stream,plain,\nb,stream,ours,5\nb,stream,ort-gqa,10\nb,stream,ort-mha,12\n"
    path = tmp_path / "results.csv"
    path.write_text(head + a + b)
    lines = table.render(table.read(path)).splitlines()
    assert lines[2] == "| a | 6.00 ms\\* | 4.00 ms | 3.00 ms | 2.00 ms |  | 3.00 | 1.50 |"
    assert lines[3] == "| b |  | 5.00 ms | 10.00 ms |  |  |  | 2.00 |"
    assert lines[4].endswith(" 3.00 | 1.73 |")
    if importlib.util.find_spec("matplotlib") is not None:
        table.draw(table.read(path), tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 1000


def test_selection() -> None:
    assert [s.name for s in models.select("")] == [
        "bert-b8-s512", "bert-b32-s128", "vitl16-b16", "llama1b-s2048", "llama1b-s8192",
    ]  # fmt: skip
    assert [s.tokens for s in models.select("vit*,bert-b8*")] == [197, 512]
    with pytest.raises(ValueError, match="no model is named 'gpt'"):
        models.select("gpt")
