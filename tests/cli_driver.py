"""Running the command in this process, and a model to run it on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from flashonnx import cli
from onnx import TensorProto, helper, numpy_helper


class Command:
    """`flashonnx`, as a shell would call it; what it said."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch
        self.out = self.err = ""

    def __call__(self, *arguments: object, code: int = 0) -> str:
        """Runs it; stdout, and stderr behind it."""
        self._monkeypatch.setattr(sys, "argv", ["flashonnx", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        self.out, self.err = self._capsys.readouterr()
        said = self.out + self.err
        assert "Traceback" not in said
        assert exit_.value.code == code, said
        return said

    def json(self, *arguments: object, code: int = 0) -> Any:
        """Runs it with --json: stdout is one object, and has no NaN."""
        self(*arguments, "--json", code=code)

        def refuse(name: str) -> Any:
            raise AssertionError(f"{name} is no JSON")

        return json.loads(self.out, parse_constant=refuse)


def written_out(scale: float = 0.25, heads: int = 4, exposed: bool = False) -> onnx.ModelProto:
    """Attention as MatMul, Mul, Softmax, MatMul; `exposed`: its probabilities are an output, so it is not fused."""
    shape = ("batch", heads, "sequence", 16)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "QKVY"]
    if exposed:
        values.append(helper.make_tensor_value_info("P", TensorProto.FLOAT, ("batch", heads, "sequence", "sequence")))
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
def flashonnx_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """In an empty folder."""
    monkeypatch.chdir(tmp_path)
    return Command(capsys, monkeypatch)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    onnx.save(written_out(), tmp_path / "plain.onnx")
    return tmp_path / "plain.onnx"
