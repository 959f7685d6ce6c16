"""benchmarks.session_overhead and benchmarks.generation on the CPU: what they measure is right and all there."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import split
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import session_overhead  # noqa: E402

SHAPE = session_overhead.Shape(batch=2, keys=40, nodes=3, heads=4, kv_heads=2, size=16)
pytestmark = pytest.mark.usefixtures("library_path")


def test_session_overhead(capsys: pytest.CaptureFixture[str]) -> None:
    assert session_overhead.main(split("--device cpu --batch 1,3 --keys 20 --nodes 2 --rounds 2")) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header == ",".join(session_overhead.COLUMNS)
    assert [line.split(",")[:6] for line in lines] == [["cpu", b, "20", "2", "eager", "wall"] for b in "13"]
    assert all(float(x) > 0 for line in lines for x in line.split(",")[6:])


def test_session_overhead_sees_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that did less would be a wrong measure."""
    made = session_overhead.model
    monkeypatch.setattr(session_overhead, "model", lambda shape: made(shape).replace(b"q_num_heads", b"Q_num_heads"))
    with pytest.raises(Exception, match="_num_heads"):
        session_overhead.measure(SHAPE, "cpu", 1)
    monkeypatch.setattr(session_overhead, "model", made)
    monkeypatch.setattr(session_overhead, "bare", lambda shape, tensors: lambda: None)
    with pytest.raises(AssertionError, match="different numbers"):
        session_overhead.measure(SHAPE, "cpu", 1)


@pytest.mark.slow
def test_generation(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways write the same tokens, of a tiny Llama."""
    transformers = pytest.importorskip("transformers")
    from benchmarks import generation

    def load() -> tuple[None, Any]:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(vocab_size=99, intermediate_size=128, initializer_range=0.2, **sizes)
        return None, transformers.LlamaForCausalLM(config).eval()

    import run

    monkeypatch.setattr(run, "load", load)
    assert generation.main(["prepare", str(tmp_path), "--float32", "--capacity", "64"]) == 0
    sizes = split("--device cpu --batch 1,3 --prompt 7 --new 20 --rounds 1 --words 99")
    assert generation.main(["run", str(tmp_path), *sizes]) == 0
    lines = [line.split(",") for line in capsys.readouterr().out.splitlines()]
    start = lines.index(list(generation.COLUMNS))
    rows = [dict(zip(generation.COLUMNS, line, strict=True)) for line in lines[start + 1 :]]
    assert [(row["batch"], row["way"]) for row in rows] == [(b, way) for b in "13" for way in generation.WAYS]
    assert {row["agree"] for row in rows} == {"20"}
