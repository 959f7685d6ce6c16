"""flashonnx.transformers: models of transformers that attend through our kernels in PyTorch itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
flashonnx = pytest.importorskip("flashonnx")
from flashonnx.export.pytorch import transformers_route  # noqa: E402
from transformers_models import FAMILIES, text  # noqa: E402

NAME = "onnx_fused"
TOLERANCE = 3e-6  # of hidden states of size 1 to 4
EVERYDAY = ("bert", "mistral", "gemma2", "t5")
_BY_ID = {family.id: family for family in FAMILIES}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Registered for the test alone: others ask whether the export leaves such names behind."""
    import flashonnx.transformers

    flashonnx.transformers._register()
    yield
    for interface in transformers_route._interfaces():
        interface._global_mapping.pop(NAME)


def small(kind: str, attention: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99}
    config |= {"intermediate_size": 64, "pad_token_id": 0}
    config = getattr(transformers, kind.removesuffix("Model").removesuffix("ForCausalLM") + "Config")(**config, **more)
    model = getattr(transformers, kind)(config).eval()
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("id", [i if i in EVERYDAY else pytest.param(i, marks=pytest.mark.slow) for i in _BY_ID])
def test_family(id: str) -> None:
    """As with sdpa in every row, or as eager where a token is no padding."""
    family = _BY_ID[id]
    model, other = family.make(), family.make("sdpa" if family.sdpa else "eager")
    model.set_attn_implementation(NAME)
    for left in (False, True):
        inputs = family.inputs(3, 9, left)
        with torch.no_grad():
            got, expected = model(**inputs)[0], other(**inputs)[0]
        rows = ... if family.sdpa else inputs["attention_mask"].bool()
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got[rows], expected[rows], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("told", [False, True])
def test_packed_sequences(told: bool, window: int | None) -> None:
    """By cu_seq_lens_q without a mask, else by positions that begin anew; each sentence is what it is by itself."""
    more = {} if window is None else {"sliding_window": window}
    model = small("MistralForCausalLM", NAME, num_key_value_heads=2, **more)
    ids, ends = torch.randint(3, 99, (1, 13)), torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    given = {"position_ids": torch.cat([torch.arange(n) for n in (5, 1, 7)])[None], "use_cache": False}
    if told:
        given |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}
    other = small("MistralForCausalLM", "sdpa", num_key_value_heads=2, **more)
    with torch.no_grad():
        got = model(input_ids=ids, **given).logits
        alone = [other(input_ids=ids[:, a:b]).logits for a, b in ((0, 5), (5, 6), (6, 13))]
    torch.testing.assert_close(got, torch.cat(alone, 1), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("window", [None, 4])
def test_generates_with_a_cache(window: int | None) -> None:
    """Padded on the left; the scores of every step are sdpa's, past keys and windows included."""
    kind = "LlamaForCausalLM" if window is None else "MistralForCausalLM"
    more = {"num_key_value_heads": 2} | ({} if window is None else {"sliding_window": window})
    results = []
    for name in ("sdpa", NAME):
        torch.manual_seed(1)
        results.append(
            small(kind, name, **more).generate(
                **text(3, 7, left=True), max_new_tokens=6, min_new_tokens=6, do_sample=False, output_scores=True,
                return_dict_in_generate=True,
            )
        )  # fmt: skip
    for expected, got in zip(*(result.scores for result in results), strict=True):
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_calls_the_operator_once_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With heads as they are, and a mask of keys alone."""
    calls = []
    operator = torch.ops.flashonnx.attention

    def spy(query: Any, key: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        calls.append((query.shape[1], key.shape[1], tuple(mask.shape), options["is_causal"]))
        return operator(query, key, value, mask, *rest, **options)

    monkeypatch.setattr(torch.ops.flashonnx, "attention", spy)
    with torch.no_grad():
        small("LlamaModel", NAME, num_key_value_heads=2)(**text(3, 7))
    assert calls == [(4, 2, (3, 1, 1, 7), True)] * 2


def test_a_model_that_reads_the_mask_itself() -> None:
    """BLOOM takes any name for its attention, asks nobody, and adds the mask to its scores."""
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=99, hidden_size=16, n_layer=1, n_head=2, use_cache=False)
    model = transformers.BloomModel(config).eval()
    model.config._attn_implementation = NAME
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"a mask is read by other code .*\(add\)"):
        model(**text(2, 7))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_attentions": True}, "BertSelfAttention is to give its attention weights"),
        ({"temperature": 0.5}, "BertSelfAttention passes 'temperature'"),
    ],
)
def test_what_is_not_known(options: dict[str, Any], message: str) -> None:
    with torch.no_grad(), pytest.raises(NotImplementedError, match=message):
        small("BertModel", NAME)(**text(2, 7), **options)


def test_dropout_and_gradients() -> None:
    model = small("BertModel", NAME)
    with pytest.raises(NotImplementedError, match="no gradient"):
        model(**text(2, 7))
    with torch.no_grad(), pytest.raises(NotImplementedError, match="put the model into eval mode"):
        model.train()(**text(2, 7))


def test_packed_sequences_keep_their_full_mask() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    inputs = {"input_ids": text(2, 9)["input_ids"], "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        got, expected = (small("LlamaModel", name)(**inputs)[0] for name in (NAME, "sdpa"))
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_export_of_a_model_that_uses_it(tmp_path: Any) -> None:
    """The route takes it as it takes sdpa, and leaves what was registered."""
    model, path = small("BertModel", NAME), tmp_path / "model.onnx"
    before = [dict(interface._global_mapping) for interface in transformers_route._interfaces()]
    report = flashonnx.export_onnx(model, (), path, kwargs=text(2, 7))
    assert {site.kind for site in report.sites} == {"torch.ops.flashonnx.attention"}
    assert [dict(interface._global_mapping) for interface in transformers_route._interfaces()] == before
    inputs = text(2, 7)
    outputs = flashonnx.session(path, ["CPUExecutionProvider"]).run(None, {n: x.numpy() for n, x in inputs.items()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(outputs[0]), model(**inputs)[0], atol=1e-5, rtol=0)
