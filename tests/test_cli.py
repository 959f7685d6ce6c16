"""The command `flashonnx`: what fuse, unfuse and verify write, what they say, how they exit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli_driver import Command, flashonnx_command, plain, written_out

pytest.importorskip("onnxruntime")
__all__ = ["flashonnx_command", "plain"]
COMMANDS = ("fuse", "export", "unfuse", "inspect", "verify", "bench", "doctor")


def test_fuse_verify_unfuse(plain: Path, flashonnx_command: Command) -> None:
    said = flashonnx_command("fuse", plain, "-o", "fused.onnx", "--report", "html", "--report", "report.json")
    assert "1 of 1 attentions fused" in said and "probabilities" in said
    assert [node.op_type for node in onnx.load("fused.onnx").graph.node] == ["FlashAttention"]
    assert json.loads(Path("report.json").read_text())["fused"] == 1
    assert "1 of 1" in Path("fused.report.html").read_text()

    said = flashonnx_command("verify", plain, "fused.onnx", "--dim", "batch=2", "--dim", "sequence=21")
    assert "The models agree" in said and "batch=2, sequence=21" in said

    said = flashonnx_command("unfuse", "fused.onnx", "-o", "back.onnx")
    assert said == "1 of 1 fused nodes are standard operators again\n"
    assert not any(node.domain == "flashonnx" for node in onnx.load("back.onnx").graph.node)
    flashonnx_command("verify", plain, "back.onnx")


def test_json_is_all_there_is_on_stdout(plain: Path, flashonnx_command: Command) -> None:
    done = flashonnx_command.json("fuse", plain, "-o", "fused.onnx", "--dim", "sequence=10", "--report", "html")
    assert (done["fused"], done["total"], done["output"]) == (1, 1, "fused.onnx")
    assert done["reports"] == ["fused.report.html"] and done["bytes_saved"] == 4 * 10 * 10 * 4
    done = flashonnx_command.json("fuse", plain, "--explain", "product", "--explain", "mean")
    assert set(done["explained"]) == {"product", "mean"}
    done = flashonnx_command.json("verify", plain, "fused.onnx", "--bisect")
    assert done["ok"] and done["parted"] is None and len(done["cases"]) == 4
    assert done["outputs"][0]["name"] == "Y" and done["outputs"][0]["error"] <= done["outputs"][0]["allowed"]
    assert [node["value"] for node in done["nodes"]] == ["Y"]
    done = flashonnx_command.json("unfuse", "fused.onnx", "-o", "back.onnx")
    assert done["total"] == 1 and done["fused"] == 0
    done = flashonnx_command.json("fuse", "missing.onnx", "-o", "fused.onnx", code=2)
    assert "missing.onnx" in done["error"] and "missing.onnx" in flashonnx_command.err


def test_without_bodies(plain: Path, flashonnx_command: Command) -> None:
    flashonnx_command("fuse", plain, "-o", "portable.onnx")
    flashonnx_command("fuse", plain, "-o", "bare.onnx", "--no-portable")
    assert onnx.load("portable.onnx").functions and not onnx.load("bare.onnx").functions


def test_for_tensorrt(plain: Path, flashonnx_command: Command) -> None:
    """What prepare_for_tensorrt makes: no bodies, and the domain that the parser or the provider knows."""
    flashonnx_command("fuse", plain, "-o", "trt.onnx", "--for", "tensorrt")
    flashonnx_command("fuse", plain, "-o", "ep.onnx", "--for", "onnxruntime-tensorrt")
    models = [onnx.load(name) for name in ("trt.onnx", "ep.onnx")]
    assert not any(model.functions for model in models)
    assert [model.graph.node[-1].domain for model in models] == ["flashonnx", "trt.plugins"]
    assert sorted(path.name for path in Path().iterdir()) == ["ep.onnx", "plain.onnx", "trt.onnx"]
    assert "--output" in flashonnx_command("fuse", plain, "--for", "tensorrt", "--report", "html", code=2)


def test_strict(plain: Path, flashonnx_command: Command) -> None:
    onnx.save(written_out(exposed=True), "exposed.onnx")
    flashonnx_command("fuse", plain, "-o", "fused.onnx", "--strict")
    assert "output of the model" in flashonnx_command("fuse", "exposed.onnx", "-o", "same.onnx")
    flashonnx_command("fuse", "exposed.onnx", "-o", "same.onnx", "--strict", code=1)


def test_unfuse_says_once_why_nodes_are_left(flashonnx_command: Command) -> None:
    layers = "\n".join(
        f"y{i} = flashonnx.FlashAttentionVarlen<q_num_heads=4, kv_num_heads=4>(x, x, x, ends)" for i in range(3)
    )
    text = f"""<ir_version: 10, opset_import: ["" : 20, "flashonnx" : 1]>
        g (float[t,32] x, int32[e] ends) => (float[t,32] y0, float[t,32] y1, float[t,32] y2) {{ {layers} }}"""
    onnx.save(onnx.parser.parse_model(text), "packed.onnx")
    said = flashonnx_command("unfuse", "packed.onnx", "-o", "plain.onnx", code=1)
    assert said.count("packs sequences") == 1 and "and 2 more: " in said


def test_verify_of_wrong_models(plain: Path, flashonnx_command: Command) -> None:
    onnx.save(written_out(scale=0.26), "wrong.onnx")
    said = flashonnx_command("verify", plain, "wrong.onnx", code=1)
    assert "The models DIFFER" in said and "They part at Mul 'scaling', value 'scores'" in said
    said = flashonnx_command("verify", plain, "wrong.onnx", "--no-bisect", code=1)
    assert "They part" not in said
    done = flashonnx_command.json("verify", plain, "wrong.onnx", code=1)
    assert not done["ok"] and done["parted"]["node"] == "Mul 'scaling'"
    assert len(done["parted"]["distribution"]) == len(done["parted"]["quantiles"])


def test_verify_sweeps_dimensions(plain: Path, flashonnx_command: Command) -> None:
    done = flashonnx_command.json("verify", plain, plain, "--dim", "batch=2", "--dim", "sequence=3,40,7")
    assert done["cases"] == ["batch=2, sequence=3", "batch=2, sequence=40", "batch=2, sequence=7"]


def test_verify_with_given_inputs(plain: Path, flashonnx_command: Command) -> None:
    random = np.random.default_rng(0)
    for length in (5, 6):
        arrays = {name: random.standard_normal((1, 4, length, 16), np.float32) for name in "QKV"}
        np.savez(f"{length}.npz", **arrays)
    said = flashonnx_command("verify", plain, plain, "--inputs", "5.npz", "--inputs", "6.npz", "--provider", "CPU")
    assert said.count("the given inputs") == 2


def test_verify_reports(plain: Path, flashonnx_command: Command) -> None:
    """A page that needs nothing else, the figure in it, and the figure alone."""
    pytest.importorskip("matplotlib")
    onnx.save(written_out(scale=0.26), "wrong.onnx")
    reports = [argument for kind in ("html", "json", "figure.png") for argument in ("--report", kind)]
    flashonnx_command("verify", plain, "wrong.onnx", *reports, code=1)
    page = Path("wrong.verify.html").read_text()
    assert "The models differ" in page and "scaling" in page and 'src="data:image/png;base64,' in page
    assert not any(word in page for word in ("http://", "https://", "<script", "<link"))
    assert Path("figure.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(Path("wrong.verify.json").read_text())["parted"]["value"] == "scores"


def test_without_matplotlib(plain: Path, flashonnx_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page says so; a figure that was asked for by name is an error, before anything is run."""
    from flashonnx.cli import _figures

    monkeypatch.setattr(_figures, "available", lambda: False)
    flashonnx_command("verify", plain, plain, "--report", "html", "--dim", "sequence=5", "--dim", "batch=1")
    page = Path("plain.verify.html").read_text()
    assert 'pip install "flashonnx[plots]"' in page and "<b>1</b> case<" in page
    said = flashonnx_command("verify", plain, "missing.onnx", "--report", "png", code=2)
    assert "pip install 'flashonnx[plots]'" in said


def test_errors_are_one_line_and_exit_with_2(plain: Path, flashonnx_command: Command, tmp_path: Path) -> None:
    broken, output, array = tmp_path / "broken.onnx", tmp_path / "out.onnx", tmp_path / "array.npy"
    broken.write_bytes(b"this is no model")
    np.save(array, np.ones(3))
    fuse = ("fuse", plain, "-o", output)
    for arguments, expected in (
        (("fuse", tmp_path / "missing.onnx", "-o", output), "missing.onnx"),
        (("fuse", broken, "-o", output), "not an ONNX model"),
        (("unfuse", broken, "-o", output), "not an ONNX model"),
        (("inspect", broken), "not an ONNX model"),
        (("verify", plain, tmp_path / "missing.onnx"), "missing.onnx"),
        (("verify", plain, plain, "--dim", "batch"), "NAME=VALUE"),
        (("verify", plain, plain, "--dim", "batch=2,x"), "NAME=VALUE"),
        (("verify", plain, plain, "--dim", "nothing=3"), "no input has a dimension 'nothing'"),
        (("verify", plain, plain, "--inputs", array), "holds one array without a name"),
        (("verify", plain, plain, "--inputs", broken), "is expected to be an .npz file"),
        (("verify", plain, plain, "--inputs", tmp_path / "missing.npz"), "missing.npz"),
        (("verify", plain, plain, "--report", "pdf"), "--report is expected to be html or json or png"),
        ((*fuse, "--report", tmp_path / "none" / "report.json"), "there is no folder"),
        ((*fuse, "--report", tmp_path / "none.png"), "--report is expected to be html or json"),
        (("fuse", plain, "-o", tmp_path / "none" / "out.onnx"), "there is no folder"),
        (("fuse", plain, "-o", "report.json", "--report", "report.json"), "both the model and a report"),
        ((*fuse, "--dim", "sequence=2,3"), "one value"),
        ((*fuse, "--explain", "probabilitys"), "did you mean 'probabilities'?"),
        (("fuse", plain), "--output"),
        (("bench", tmp_path / "missing.onnx", plain), "missing.onnx"),
        (("bench", "--lengths", "a"), "--lengths are expected as numbers"),
        (("bench", "--heads", "3", "--kv-heads", "2"), "multiple of --kv-heads"),
        (("bench", "--peers", "nobody"), "--peers are flashonnx, ORT Attention"),
        (("inspect", plain, "--gpu", "7.5"), "--gpu is expected to be a compute capability"),
    ):
        said = flashonnx_command(*arguments, code=2)
        assert expected in said, said
        assert said.startswith("flashonnx: ") and said.count("\n") == 1, said
    assert not output.exists()


def test_explain(plain: Path, flashonnx_command: Command) -> None:
    """Any node of an attention, and one of none; a file is written only if asked for."""
    lengths = ("--dim", "batch=2", "--dim", "sequence=100")
    for name in ("probabilities", "product", "scaling", "P"):
        said = flashonnx_command("fuse", plain, "--explain", name, *lengths)
        assert said.startswith("probabilities: Softmax, fused\n")
        for words in (
            "MatMul 'product' > Mul 'scaling' > Softmax 'probabilities' > MatMul 'mean'",
            "batch × 4 × sequence × sequence",
            "320 kB at batch=2, sequence=100",
            "FlashAttention(4-D, scale=0.25)",
        ):
            assert words in said
    said = flashonnx_command("fuse", plain, "--explain", "transpose")
    assert said.startswith("Transpose 'transpose' is part of no attention: ")
    assert [path.name for path in Path().iterdir()] == ["plain.onnx"]
    said = flashonnx_command("fuse", plain, "-o", plain, "--explain", "probabilities")
    assert said.startswith("probabilities: Softmax, fused")
    assert [node.op_type for node in onnx.load(plain).graph.node] == ["FlashAttention"]


def test_reports_without_a_model(plain: Path, flashonnx_command: Command) -> None:
    said = flashonnx_command("fuse", plain, "--report", "json", "--dim", "sequence=10")
    assert "1.6 kB of queries by keys no longer formed (at batch=1, sequence=10)" in said
    assert json.loads(Path("plain.report.json").read_text())["bytes_saved"] == 4 * 10 * 10 * 4
    assert sorted(path.name for path in Path().iterdir()) == ["plain.onnx", "plain.report.json"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command: str, flashonnx_command: Command) -> None:
    said = flashonnx_command(command, "--help")
    assert "--json" in said and f"flashonnx {command}" in said


def test_bad_use_exits_with_2(plain: Path, flashonnx_command: Command) -> None:
    for arguments in (("fuse", plain, "--bogus"), ("nothing",), ("fuse",), ("fuse", plain, "--for", "nobody")):
        flashonnx_command(*arguments, code=2)
        assert not flashonnx_command.out and "Error" in flashonnx_command.err


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashonnx", *arguments],
        capture_output=True, text=True, check=False, timeout=120, env=os.environ | environment,
    )  # fmt: skip


def test_module_version_and_completion() -> None:
    import flashonnx

    assert process("--version").stdout == f"flashonnx {flashonnx.__version__}\n"
    assert all(command in process("--help").stdout for command in COMMANDS)
    script = process("--show-completion", "bash", SHELL="/bin/bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_FLASHONNX_COMPLETE=complete_bash" in script.stdout, script.stdout + script.stderr
    for words, expected in (("flashonnx in", {"inspect"}), ("flashonnx fuse --no-p", {"--no-portable"})):
        count = str(len(words.split()) - 1)
        done = process(_FLASHONNX_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=count)
        assert set(done.stdout.split()) == expected, done.stdout + done.stderr


CHATTER = """
import ctypes
from flashonnx.cli._output import emit, working

libc = ctypes.CDLL(None)
libc.puts(b"before")
with working("something"):
    print("from Python")
    libc.puts(b"from C")
libc.puts(b"after")
libc.fflush(None)
emit({})
"""


def test_what_others_print_goes_to_stderr() -> None:
    """Exporters and runtimes talk, in Python and in C; a program that reads --json must not hear it."""
    done = subprocess.run([sys.executable, "-c", CHATTER], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "before\nafter\n{}\n"
    assert set(done.stderr.split("\n")) >= {"from Python", "from C"}
