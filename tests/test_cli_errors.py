"""The command `flashonnx` when things go wrong outside of it: stdout, the keyboard, other people's messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import flashonnx
import numpy as np
import onnx
import pytest
from cli_driver import Command, flashonnx_command, plain, written_out

onnxruntime = pytest.importorskip("onnxruntime")
__all__ = ["flashonnx_command", "plain"]


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`flashonnx` as a shell runs it."""
    modules = os.pathsep.join(os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)
    command = command.replace("flashonnx", f"{sys.executable} -m flashonnx", 1)
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=os.environ | {"PYTHONPATH": modules},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("flashonnx inspect plain.onnx > /dev/full", 2, "could not be written to stdout: No space left on device\n"),
        ("flashonnx inspect plain.onnx --json > /dev/full", 2, "stdout: No space left on device\n"),
        ("flashonnx inspect missing.onnx --json > /dev/full", 2, "stdout: No space left on device\n"),
        ("flashonnx inspect plain.onnx | true; exit ${PIPESTATUS[0]}", 141, ""),  # as of other programs: 128 + SIGPIPE
        ("flashonnx verify plain.onnx plain.onnx --json | true; exit ${PIPESTATUS[0]}", 141, ""),
        ("flashonnx inspect plain.onnx >&-", 0, ""),
        ("flashonnx inspect plain.onnx 2>&-", 0, ""),
        ("flashonnx inspect missing.onnx 2> /dev/full", 2, ""),
    ],
)
def test_stdout_that_cannot_be_written(command: str, code: int, said: str, plain: Path, library_path: str) -> None:
    """One line or none, and a code that does not say "no"."""
    done = shell(command, plain.parent)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") <= 2
    assert done.stderr.endswith(said) and bool(done.stderr) >= bool(said)


@pytest.mark.parametrize("arguments", [("inspect",), ("inspect", "--nope"), ("nope",), ("fuse", "x", "--for", "it")])
def test_errors_of_usage_are_json_too(arguments: tuple[str, ...], flashonnx_command: Command) -> None:
    told = flashonnx_command.json(*arguments, code=2)
    assert set(told) == {"error"} and told["error"] and told["error"] in flashonnx_command.err
    said = flashonnx_command(*arguments, code=2)  # in typer's box
    assert "Usage: flashonnx" in said and not flashonnx_command.out


def test_the_keyboard(plain: Path, flashonnx_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted before a file takes its place: the old one stays, and nothing lies beside it."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = plain.read_bytes()
    monkeypatch.setattr(os, "replace", interrupted)
    for command in (("fuse", plain, "-o", plain), ("fuse", plain, "--report", "html"), ("unfuse", plain, "-o", plain)):
        for more in ((), ("--json",)):
            flashonnx_command(*command, *more, code=130)
            assert plain.read_bytes() == before and os.listdir(plain.parent) == [plain.name]


def test_what_onnxruntime_says_is_shortened(plain: Path, flashonnx_command: Command) -> None:
    """Neither its code nor where in its sources: what is wrong."""
    model = written_out()
    model.ir_version = 99
    onnx.save(model, "new.onnx")
    said = flashonnx_command("verify", plain, "new.onnx", "--dim", "batch=1", "--dim", "sequence=4", code=2)
    assert said.startswith("flashonnx: ONNX Runtime: Load model from new.onnx failed: Unsupported model IR version: 99")
    assert "onnxruntime_src" not in said and said.count("\n") == 1

    from flashonnx.cli._errors import of_onnxruntime

    with pytest.raises(Exception, match="while running") as failed:
        flashonnx.session(plain).run(
            None, {name: np.ones((1, 4, n, 16), np.float32) for name, n in zip("QKV", (3, 3, 5), strict=True)}
        )
    text = of_onnxruntime(str(failed.value))
    assert text.startswith("MatMul 'mean': ") and "/" not in text.partition(":")[0] and "onnxruntime_src" not in text


@pytest.mark.parametrize("command", [("fuse", "-o"), ("unfuse", "-o"), ("fuse", "--report", "html", "-o")])
def test_no_model_goes_to_stdout(command: tuple[str, ...], plain: Path, flashonnx_command: Command) -> None:
    """A dash stands for it elsewhere; here it would be a file of that name."""
    said = flashonnx_command(command[0], plain, *command[1:], "-", code=2)
    assert said.startswith("flashonnx: cannot write to '-': models and reports go to files") and said.count("\n") == 1
    assert not Path("-").exists()


def test_errors_have_their_notes() -> None:
    """What to do comes before the one line that is left of what torch's exporter says."""
    from flashonnx.cli._errors import told

    error = RuntimeError("Failed to export.\nNext steps:\n\n## Exception summary\n\nFound a DynamicCache\n(more)")
    assert told(error) == "Failed to export. Found a DynamicCache"
    error.add_note("set use_cache")
    assert told(error) == "set use_cache (torch.export: Found a DynamicCache ...)"
    assert told(KeyError("x")) == "KeyError: 'x'"
    assert told(FileNotFoundError(2, "No such file or directory", "x.npz")) == "x.npz: No such file or directory"


def test_inputs_are_named(plain: Path, flashonnx_command: Command) -> None:
    """The input, what was expected, what came."""
    good = {name: np.ones((1, 4, 3, 16), np.float32) for name in "QKV"}
    for wrong, said in (
        ({"K": good["K"].astype(np.float64)}, "input 'K' is expected to be float32, got float64"),
        ({"V": good["V"][:, :3]}, "input 'V' is expected to have shape (batch, 4, sequence, 16), got (1, 3, 3, 16)"),
        ({"Q": good["Q"][0]}, "input 'Q' is expected to have shape (batch, 4, sequence, 16), got (4, 3, 16)"),
        ({"X": good["Q"]}, "inputs are expected for ['Q', 'K', 'V'], got ['K', 'Q', 'V', 'X']"),
    ):
        np.savez("inputs.npz", **(good | wrong))
        assert said in flashonnx_command("verify", plain, plain, "--inputs", "inputs.npz", code=2)
    Path("junk.npz").write_bytes(b"neither")
    assert "'junk.npz' is none" in flashonnx_command("verify", plain, plain, "--inputs", "junk.npz", code=2)
    np.savez("inputs.npz", **good)
    told = flashonnx_command.json("verify", plain, plain, "--inputs", "inputs.npz")
    assert told["ok"]


def test_paths(plain: Path, flashonnx_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters and signs of any language, onto the file itself; and a folder that takes no files."""
    plain = plain.rename("Größe ☃ 注意.onnx")
    said = flashonnx_command("fuse", plain, "-o", plain, "--report", "html")
    assert "1 of 1 attentions fused" in said and Path("Größe ☃ 注意.report.html").is_file()
    assert flashonnx_command.json("inspect", plain)["sites"][0]["fused"]
    assert "The models agree" in flashonnx_command("verify", plain, plain, "--dim", "batch=1", "--dim", "sequence=3")
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)  # a super-user may write everywhere
    for command in (("fuse", plain, "-o", "x.onnx"), ("unfuse", plain, "-o", "x.onnx"), ("inspect", plain)):
        said = flashonnx_command(*command, code=0 if command[0] == "inspect" else 2)
        assert ("cannot write 'x.onnx': nothing can be written to its folder" in said) == (command[0] != "inspect")


def test_weights_that_are_missing(plain: Path, flashonnx_command: Command) -> None:
    onnx.save(written_out(), "apart.onnx", save_as_external_data=True, location="gone.data", size_threshold=0)
    Path("gone.data").unlink()
    for command in (("verify", plain, "apart.onnx"), ("fuse", "apart.onnx", "-o", "x.onnx"), ("inspect", "apart.onnx")):
        said = flashonnx_command(*command, code=2)
        assert "weights" in said and "gone.data" in said and "not an ONNX model" not in said
    assert "error" in json.loads(flashonnx_command("bench", "apart.onnx", "--json", code=2).partition("\nflashonnx")[0])


def test_models_beyond_protobuf_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights beside the file, and nothing else; a link stays one."""
    from flashonnx import _large
    from flashonnx.cli import _files

    monkeypatch.setattr(_large, "LIMIT", 0)
    model = written_out()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((40, 40), np.float32), "weights"))
    (tmp_path / "real").mkdir()
    (tmp_path / "link.onnx").symlink_to("real/model.onnx")
    _files.write_model(tmp_path / "link.onnx", model)
    assert sorted(os.listdir(tmp_path / "real")) == ["link.onnx.data", "model.onnx"]
    read = onnx.load(tmp_path / "real" / "model.onnx")
    assert onnx.numpy_helper.to_array(read.graph.initializer[-1]).sum() == 1600
    assert (tmp_path / "link.onnx").is_symlink() and len(os.listdir(tmp_path)) == 2
