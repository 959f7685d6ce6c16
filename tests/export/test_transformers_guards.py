"""Where the route through transformers' interfaces must not change what a model means."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
flashonnx = pytest.importorskip("flashonnx")
from flashonnx.export.pytorch import transformers_route  # noqa: E402
from transformers import masking_utils, modeling_utils  # noqa: E402

_NAME = "of_the_user"


def bert(attention: str) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        attn_implementation=attention,
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def inputs(empty: bool = False) -> dict[str, Any]:
    """Two sequences of 7 tokens, the second padded, or all padding."""
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 0 if empty else 4 :] = 0
    return {"input_ids": torch.arange(14).reshape(2, 7), "attention_mask": mask}


def difference(model: Any, path: Path, given: dict[str, Any]) -> float:
    """Between ONNX Runtime's hidden states and PyTorch's, all rows counted."""
    session = flashonnx.session(path, ["CPUExecutionProvider"])
    out = session.run(None, {i.name: given[i.name].numpy() for i in session.get_inputs()})[0]
    with torch.no_grad():
        return float(np.abs(out - model(**given)[0].numpy()).max())


@pytest.fixture
def registered() -> Iterator[None]:
    """An attention function of the user's, sdpa of scores twice as large, and a mask function."""

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **kw: Any) -> Any:
        sdpa = modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query * 2, key, value, mask, scaling=scaling, **kw)

    transformers.AttentionInterface.register(_NAME, attend)
    transformers.AttentionMaskInterface.register(_NAME, masking_utils.sdpa_mask)
    yield
    modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping.pop(_NAME)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(_NAME)


@pytest.mark.usefixtures("registered")
def test_attention_of_the_user_is_kept(tmp_path: Path) -> None:
    model, path = bert("sdpa"), tmp_path / "model.onnx"
    model.set_attn_implementation(_NAME)
    report = flashonnx.export_onnx(model, (), path, kwargs=inputs())
    assert any(f"'{_NAME}', whose meaning the route does not know" in note for note in report.notes)
    assert difference(model, path, inputs()) < 1e-5


@pytest.mark.parametrize("kind", ["attention", "mask"])
def test_functions_that_were_replaced(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces = {
        "attention": modeling_utils.ALL_ATTENTION_FUNCTIONS,
        "mask": masking_utils.ALL_MASK_ATTENTION_FUNCTIONS,
    }
    monkeypatch.setitem(interfaces[kind]._global_mapping, "sdpa", lambda *args, **kwargs: None)
    reason = transformers_route.candidate(bert("sdpa"))
    assert reason is not None
    assert f"the {kind} function 'sdpa', which is not transformers' own" in reason


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_rows_without_a_key(attention: str, tmp_path: Path) -> None:
    """Zero where masks leave out, the mean of V where eager layers add finfo.min; all rows are compared."""
    model, path = bert(attention), tmp_path / "model.onnx"
    report = flashonnx.export_onnx(model, (), path, kwargs=inputs())
    assert [site.kind for site in report.sites] == ["torch.ops.flashonnx.attention"]
    for empty in (False, True):
        assert difference(model, path, inputs(empty)) < 1e-5


def test_a_route_that_cannot_begin_leaves_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(masking_utils, "find_packed_sequence_indices")
    model = bert("sdpa")
    with pytest.raises(AttributeError), transformers_route.Route(model):
        pass
    assert model.config._attn_implementation == "sdpa"
    for interface in transformers_route._interfaces():
        assert transformers_route.NAME not in interface._global_mapping


def test_a_cache_among_the_outputs_is_explained(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.LlamaModel(config).eval()
    with pytest.raises(Exception, match="cache") as caught:
        flashonnx.export_onnx(model, (torch.ones(1, 4, dtype=torch.int64),), tmp_path / "model.onnx")
    for words in ("model.config.use_cache = False", 'kv_cache="static"'):
        assert any(words in note for note in caught.value.__notes__)


def test_nothing_is_said_that_is_not_about_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """With sizes that are all fixed the exporter tries to compute a node, cannot, and leaves it as it is."""
    ids = torch.ones(2, 16, dtype=torch.int64)
    flashonnx.export_onnx(bert("sdpa"), (ids, ids), tmp_path / "bert.onnx")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert capfd.readouterr() == ("", "")
