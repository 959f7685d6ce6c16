"""More architectures of transformers by export_onnx: every attention is one node with PyTorch's answers.

Each has something of its own: a constant on Q (OPT), a floor under the scores (XGLM), a factor for each head (Swin V2),
positions in the scores (DeBERTa, MPNet, UMT5, BEiT), rotation after the scale (ESM), parts of heads (DeepSeek).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from models import attributes, nodes, op_types, shape_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
flashonnx = pytest.importorskip("flashonnx")
from transformers_models import _GROUPED, _IMAGE, _LAYERS, _PAIR, _TEXT, _WIDTHS, Family, image, pair, text  # noqa: E402

_CAUSAL = {"is_causal": 1}
_KEYS = ("batch", 1, 1, "sequence")
_JOINED = {"qkv_layout": b"3hd"}
_SPREAD = ("batch", 4, "sequence", "sequence")  # positions in the scores, and padding
_DECODED = (1, 4, "decoder_sequence", "decoder_sequence")
_WINDOW = {"is_causal": 1, "left_window_size": 3}
_OPT = {"vocab_size": 99, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "use_cache": False}  # fmt: skip
_XGLM = {"vocab_size": 99, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64, "use_cache": False,
         "max_position_embeddings": 64}  # fmt: skip
_DEBERTA = {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
            "norm_rel_ebd": "layer_norm", "share_att_key": True}  # fmt: skip
_SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}
_LATENT = {**_GROUPED, "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 16, "kv_lora_rank": 8,
           "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
           "first_k_dense_replace": 2}  # fmt: skip
_BOTH = {**_GROUPED, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_UMT5 = {**_PAIR, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}

MODELS = (
    Family("opt", "OPTModel", ("OPTConfig", _OPT), attributes=(_CAUSAL | _JOINED,)),
    Family("xglm", "XGLMModel", ("XGLMConfig", _XGLM), attributes=(_CAUSAL | _JOINED | {"empty_row": b"mean"},)),
    Family("swinv2", "Swinv2Model", ("Swinv2Config", _SWIN), image,
           masks=((2, 16, 16), ("4*batch", 2, 16, 16), (2, 16, 16)), nodes=3),  # windows, and windows moved
    Family("deberta_v2", "DebertaV2Model", ("DebertaV2Config", _DEBERTA), masks=(_SPREAD,)),
    Family("xlm_roberta", "XLMRobertaModel", ("XLMRobertaConfig", {**_TEXT, "pad_token_id": 1}), attributes=(_JOINED,)),
    Family("mpnet", "MPNetModel", ("MPNetConfig", _TEXT), attributes=(_JOINED,), masks=(_SPREAD,)),
    Family("esm", "EsmModel", ("EsmConfig", {**_TEXT, "pad_token_id": 1, "position_embedding_type": "rotary"})),
    Family("beit", "BeitModel", ("BeitConfig", {**_IMAGE, "use_relative_position_bias": True}), image,
           attributes=(_JOINED,), masks=((1, 4, 17, 17),)),
    Family("umt5", "UMT5Model", ("UMT5Config", _UMT5), pair,
           attributes=(_JOINED, _JOINED, _CAUSAL | _JOINED, {}, _CAUSAL | _JOINED, {}),
           masks=(_SPREAD, _SPREAD, _DECODED, _KEYS, _DECODED, _KEYS), nodes=6),
    Family("mbart", "MBartModel", ("MBartConfig", {**_PAIR, **_LAYERS, **_WIDTHS, "max_position_embeddings": 64}), pair,
           attributes=(_JOINED, _JOINED, _CAUSAL | _JOINED, {}, _CAUSAL | _JOINED, {}),
           masks=(_KEYS, _KEYS, None, _KEYS, None, _KEYS), nodes=6),
    Family("starcoder2", "Starcoder2Model", ("Starcoder2Config", _GROUPED), attributes=(_CAUSAL,)),
    Family("cohere2", "Cohere2Model", ("Cohere2Config", _BOTH),  # without rotation where it sees all
           attributes=(_WINDOW, _CAUSAL | {"qkv_layout": b"gqa"})),
    Family("deepseek_v3", "DeepseekV3Model", ("DeepseekV3Config", _LATENT), attributes=(_CAUSAL,)),
)  # fmt: skip
EVERYDAY = ("opt", "xglm", "swinv2")
COUNTS = {"q_num_heads", "kv_num_heads", "scale"}


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[] if family.id in EVERYDAY else pytest.mark.slow, id=family.id) for family in MODELS],
)
def test_each_attention_is_one_node(family: Family, tmp_path: Path) -> None:
    model, path = family.make(), tmp_path / "model.onnx"
    with torch.no_grad():  # enough in its weights that answers differ
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    report = flashonnx.export_onnx(model, (), path, kwargs=family.inputs(2, 7), dynamic_shapes=family.axes)
    assert report.fused == report.total == family.nodes, str(report)
    fused = onnx.load(path)
    assert "Softmax" not in op_types(fused)
    for index, node in enumerate(nodes(fused)):
        found = {key: value for key, value in attributes(node).items() if key not in COUNTS}
        assert found == family.attributes[index % len(family.attributes)]
        mask = family.masks[index % len(family.masks)]
        assert (tuple(shape_of(fused, node.input[3])) if any(node.input[3:4]) else None) == mask
    session = flashonnx.session(path, ["CPUExecutionProvider"])
    for batch, sequence, left in ((2, 7, False), (3, 9, True), (1, 4, False)):
        inputs = family.inputs(batch, sequence, left)
        given = {value.name: inputs[value.name].numpy() for value in session.get_inputs()}
        with torch.no_grad():
            want = model(**inputs)[0].numpy()
        seen = inputs["attention_mask"].bool().numpy() if family.inputs is text else ...  # padding gives anything
        got = session.run(None, given)[0]
        assert got.shape == want.shape
        np.testing.assert_allclose(got[seen], want[seen], atol=3e-5 * max(1.0, np.abs(want[seen]).max()))
