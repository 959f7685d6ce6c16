"""The command `flashonnx`: what it writes, what it says, how it exits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import flashonnx
import numpy as np
import onnx
import pytest
from flashonnx import cli
from onnx import TensorProto, helper, numpy_helper

onnxruntime = pytest.importorskip("onnxruntime")


def written_out(scale: float = 0.25) -> onnx.ModelProto:
    """Attention as MatMul, Mul, Softmax, MatMul."""
    shape = ("batch", 4, "sequence", 16)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "QKVY"]
    nodes = [
        helper.make_node("Transpose", ["K"], ["KT"], perm=(0, 1, 3, 2), name="transpose"),
        helper.make_node("MatMul", ["Q", "KT"], ["QK"], name="product"),
        helper.make_node("Mul", ["QK", "scale"], ["scores"], name="scaling"),
        helper.make_node("Softmax", ["scores"], ["P"], axis=-1, name="probabilities"),
        helper.make_node("MatMul", ["P", "V"], ["Y"], name="mean"),
    ]
    graph = helper.make_graph(
        nodes, "attention", values[:3], values[3:], [numpy_helper.from_array(np.float32(scale), "scale")]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    onnx.save(written_out(), tmp_path / "plain.onnx")
    return tmp_path / "plain.onnx"


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, str]:
    """Exit code and all that was said."""
    monkeypatch.setattr(sys, "argv", ["flashonnx", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return exit_.value.code, captured.out + captured.err


def test_fuse_verify_unfuse(
    plain: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fused, back = tmp_path / "fused.onnx", tmp_path / "back.onnx"
    reports = ["--json", tmp_path / "report.json", "--html", tmp_path / "report.html"]
    code, said = run(capsys, monkeypatch, "fuse", plain, "-o", fused, *reports)
    assert code == 0 and "1 of 1 attentions fused" in said and "probabilities" in said
    assert [node.op_type for node in onnx.load(fused).graph.node] == ["FlashAttention"]
    assert json.loads((tmp_path / "report.json").read_text())["fused"] == 1
    assert "1 of 1" in (tmp_path / "report.html").read_text()

    code, said = run(capsys, monkeypatch, "verify", plain, fused, "--dim", "batch=2", "--dim", "sequence=21")
    assert code == 0 and "The models agree" in said and "batch=2, sequence=21" in said

    code, said = run(capsys, monkeypatch, "unfuse", fused, "-o", back)
    assert code == 0 and said == "1 of 1 FlashAttention nodes are standard operators again\n"
    assert not any(node.domain == "flashonnx" for node in onnx.load(back).graph.node)
    code, said = run(capsys, monkeypatch, "verify", plain, back)
    assert code == 0, said


def test_without_bodies(
    plain: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(capsys, monkeypatch, "fuse", plain, "-o", tmp_path / "portable.onnx")
    run(capsys, monkeypatch, "fuse", plain, "-o", tmp_path / "bare.onnx", "--no-portable")
    assert onnx.load(tmp_path / "portable.onnx").functions and not onnx.load(tmp_path / "bare.onnx").functions


def test_verify_of_wrong_models_exits_with_1(
    plain: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    onnx.save(written_out(scale=0.26), tmp_path / "wrong.onnx")
    code, said = run(capsys, monkeypatch, "verify", plain, tmp_path / "wrong.onnx")
    assert code == 1 and "The models DIFFER" in said


def test_verify_with_given_inputs(
    plain: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    np.savez(tmp_path / "inputs.npz", **{name: np.ones((1, 4, 5, 16), np.float32) for name in "QKV"})
    code, said = run(capsys, monkeypatch, "verify", plain, plain, "--inputs", tmp_path / "inputs.npz")
    assert code == 0 and "the given inputs" in said


def test_errors_are_one_line_and_exit_with_2(
    plain: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"this is no model")
    output, array = tmp_path / "out.onnx", tmp_path / "array.npy"
    np.save(array, np.ones(3))
    for arguments, expected in (
        (("fuse", tmp_path / "missing.onnx", "-o", output), "missing.onnx"),
        (("fuse", broken, "-o", output), "not an ONNX model"),
        (("unfuse", broken, "-o", output), "not an ONNX model"),
        (("verify", plain, tmp_path / "missing.onnx"), "missing.onnx"),
        (("verify", plain, plain, "--dim", "batch"), "NAME=VALUE"),
        (("verify", plain, plain, "--dim", "nothing=3"), "no input has a dimension 'nothing'"),
        (("verify", plain, plain, "--inputs", array), "holds one array without a name"),
        (("verify", plain, plain, "--inputs", broken), "is expected to be an .npz file"),
        (("verify", plain, plain, "--inputs", tmp_path / "missing.npz"), "missing.npz"),
        (("fuse", plain, "-o", output, "--json", tmp_path / "none" / "report.json"), "there is no folder"),
        (("fuse", plain, "-o", output, "--html", tmp_path / "none" / "report.html"), "there is no folder"),
        (("fuse", plain, "-o", output, "--html", tmp_path), "it is a folder"),
        (("fuse", plain, "-o", output, "--json", output), "both the model and a report"),
        (("fuse", plain, "-o", output, "--explain", "probabilitys"), "did you mean 'probabilities'?"),
        (("fuse", plain), "--output"),
    ):
        code, said = run(capsys, monkeypatch, *arguments)
        assert code == 2 and expected in said, said
        assert said.startswith("flashonnx: ") and said.count("\n") == 1, said
    assert not output.exists()


def test_explain(
    plain: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Any node of an attention, and one of none; a file is written only if asked for."""
    lengths = ("--dim", "batch=2", "--dim", "sequence=100")
    for name in ("probabilities", "product", "scaling", "P"):
        code, said = run(capsys, monkeypatch, "fuse", plain, "--explain", name, *lengths)
        assert code == 0
        assert said.startswith("probabilities: Softmax, fused\n")
        for words in (
            "MatMul 'product' > Mul 'scaling' > Softmax 'probabilities' > MatMul 'mean'",
            "batch × 4 × sequence × sequence",
            "320 kB at batch=2, sequence=100",
            "FlashAttention(4-D, scale=0.25)",
        ):
            assert words in said
    code, said = run(capsys, monkeypatch, "fuse", plain, "--explain", "transpose")
    assert code == 0 and said.startswith("Transpose 'transpose' is part of no attention: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.onnx"]
    code, said = run(capsys, monkeypatch, "fuse", plain, "-o", plain, "--explain", "probabilities")
    assert code == 0 and said.startswith("probabilities: Softmax, fused")
    assert [node.op_type for node in onnx.load(plain).graph.node] == ["FlashAttention"]


def test_reports_without_a_model(
    plain: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, said = run(capsys, monkeypatch, "fuse", plain, "--json", tmp_path / "r.json", "--dim", "sequence=10")
    assert code == 0 and "1.6 kB of queries by keys no longer formed (at batch=1, sequence=10)" in said
    assert json.loads((tmp_path / "r.json").read_text())["bytes_saved"] == 4 * 10 * 10 * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.onnx", "r.json"]


def test_info(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, said = run(capsys, monkeypatch, "info")
    assert code == 0
    assert flashonnx.library_path() in said and "CPUExecutionProvider" in said
    assert "cpu (float32, float16, bfloat16)" in said
    foreign = next(Path(onnxruntime.__file__).parent.glob("capi/*.so*"))
    monkeypatch.setenv("FLASHONNX_LIBRARY", str(foreign))
    code, said = run(capsys, monkeypatch, "info")
    assert code == 0 and "a shared library, but not flashonnx's" in said
    monkeypatch.setenv("FLASHONNX_LIBRARY", str(tmp_path / "missing.so"))
    code, said = run(capsys, monkeypatch, "info")
    assert code == 0 and "no: the flashonnx library" in said and "does not exist" in said


def test_module_and_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flashonnx.cli", "--help"], capture_output=True, text=True, check=True, timeout=120
    )
    assert all(command in done.stdout for command in ("fuse", "unfuse", "verify", "info"))
