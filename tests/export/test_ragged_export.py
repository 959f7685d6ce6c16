"""Models that attend within packed sequences: by our operator in PyTorch, transformers, flash-attn's function."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")
flashonnx = pytest.importorskip("flashonnx")
from flashonnx.reference_cache import attention_varlen as reference  # noqa: E402
from models import attributes, has_library, nodes, op_types  # noqa: E402

pytestmark = pytest.mark.skipif(not has_library(), reason="packed sequences need the library")
ENDS = [0, 5, 5, 6, 13]  # the second sequence is empty
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def varlen(*inputs: Any, **attributes: Any) -> Any:
    import flashonnx.torch  # noqa: F401  registers the operator

    return torch.ops.flashonnx.attention_varlen(*inputs, **attributes)


def run(path: Path, *inputs: Any) -> np.ndarray:
    session = flashonnx.session(path, ["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "left_window_size": 2, "softcap": 1.5, "scale": 0.3},
        {"left_window_size": 1, "right_window_size": 2},
        {"max_q_length": 7, "max_kv_length": 7},
    ],
)
@pytest.mark.parametrize("sinks", [False, True])
def test_operator(device: str, given: dict[str, Any], sinks: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(13, 4, 16), torch.randn(13, 2, 16), torch.randn(13, 2, 24)
    more = [None, torch.randn(4)] if sinks else []
    ends = torch.tensor(ENDS, dtype=torch.int32)
    got = varlen(*(x if x is None else x.to(device) for x in (q, k, v, ends, *more)), **given)
    arrays = [x if x is None else x.numpy() for x in (q, k, v, ends, *more)]
    np.testing.assert_allclose(got.cpu().numpy(), reference(*arrays, **given)[0], atol=2e-5)


def test_keys_of_other_lengths_and_strides() -> None:
    """Q, K and V cut out of one projection; more keys than queries."""
    torch.manual_seed(0)
    q, packed = torch.randn(4, 3, 8), torch.randn(9, 2, 3, 8)
    k, v = packed.unbind(1)
    of_q, of_k = torch.tensor([0, 1, 4]), torch.tensor([0, 4, 9])
    got = varlen(q, k, v, of_q, of_k, is_causal=True)
    arrays = [x.numpy() for x in (q, k, v)] + [x.numpy().astype(np.int32) for x in (of_q, of_k)]
    np.testing.assert_allclose(got.numpy(), reference(*arrays, is_causal=True)[0], atol=2e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": torch.zeros(13, 64)}, "'Q' is expected to be"),
        ({"value": torch.zeros(12, 2, 16)}, "Q, K and V are expected"),
        ({"query": torch.zeros(13, 3, 16)}, "Hkv divides Hq"),
        ({"cu_seqlens_q": torch.zeros(4)}, "'cu_seqlens_q' is expected"),
        ({"sinks": torch.zeros(2)}, "'sinks' is expected"),
        ({"scale": -1.0}, "'scale' is expected"),
    ],
)
def test_what_it_refuses(change: dict[str, Any], words: str) -> None:
    given = {
        "query": torch.zeros(13, 4, 16), "key": torch.zeros(13, 2, 16), "value": torch.zeros(13, 2, 16),
        "cu_seqlens_q": torch.tensor(ENDS),
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        varlen(**(given | change))


def flash_attn_op() -> Any:
    """flash-attn's operator; its package is for CUDA alone, so a stand-in of the same schema where it is not there."""
    known = getattr(torch.ops.flash_attn, "_flash_attn_varlen_forward", None)
    if known is not None:
        return known
    schema = (
        "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
        "SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1, "
        "SymInt window_size_right=-1, float softcap=0., Tensor? alibi_slopes=None, bool return_softmax=False, "
        "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    )

    def forward(q: Any, k: Any, v: Any, starts: Any, ends: Any, *rest: Any) -> Any:
        y = varlen(q, k, v, starts, ends, scale=rest[3], is_causal=rest[4])
        return y, q.new_empty(0), q.new_empty(0), q.new_empty(0)

    op = torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", forward, mutates_args=(), schema=schema)
    op.register_fake(lambda q, *rest: (torch.empty_like(q), q.new_empty(0), q.new_empty(0), q.new_empty(0)))
    return torch.ops.flash_attn._flash_attn_varlen_forward


class Packed(torch.nn.Module):
    """A layer over packed tokens, by either operator."""

    def __init__(self, by_flash_attn: bool, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.by_flash_attn, self.more = by_flash_attn, more
        self.eval()

    def forward(self, x: Any, cu_seqlens: Any) -> Any:
        q, k, v = self.qkv(x).reshape(x.shape[0], 3, 4, 8).unbind(1)
        if self.by_flash_attn:
            op = torch.ops.flash_attn._flash_attn_varlen_forward
            y = op(q, k, v, cu_seqlens, cu_seqlens, 7, 7, 0.0, 8**-0.5, True, **self.more)[0]
        else:
            y = torch.ops.flashonnx.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, is_causal=True)
        return self.out(y.reshape(x.shape[0], 32))

    def expected(self, x: Any, ends: list[int]) -> np.ndarray:
        """Each sequence by itself, by PyTorch's own attention."""
        rows = []
        with torch.no_grad():
            for start, end in itertools.pairwise(ends):
                q, k, v = self.qkv(x[start:end]).reshape(-1, 3, 4, 8).permute(1, 2, 0, 3)
                y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                rows.append(self.out(y.transpose(0, 1).reshape(-1, 32)))
        return torch.cat(rows).numpy()


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("by_flash_attn", [False, True])
def test_own_modules(by_flash_attn: bool, kind: Any, tmp_path: Path) -> None:
    """cu_seqlens is an input of the graph, and other numbers of sequences than the example's are as good."""
    flash_attn_op()
    layer, path = Packed(by_flash_attn), tmp_path / "packed.onnx"
    x, ends = torch.randn(13, 32), torch.tensor(ENDS, dtype=kind)
    report = flashonnx.export_onnx(layer, (x, ends), path, dynamic_shapes=({0: "tokens"}, {0: "ends"}))
    assert report.fused == report.total == 1, str(report)
    model = onnx.load(path)
    (node,) = nodes(model)
    assert node.op_type == "FlashAttentionVarlen"
    assert set(attributes(node)) == {"is_causal"} | ({"scale"} if by_flash_attn else set())
    assert not node.input[4:]
    for given in (ENDS, [0, 9], [0, 1, 2, 20]):
        x = torch.randn(given[-1], 32)
        want = layer.expected(x, given)
        np.testing.assert_allclose(run(path, x, torch.tensor(given, dtype=kind)), want, atol=2e-5)


def test_what_flash_attn_has_besides(tmp_path: Path) -> None:
    flash_attn_op()
    layer = Packed(True, alibi_slopes=torch.ones(4))
    with pytest.raises(Exception, match="alibi_slopes") as error:
        flashonnx.export_onnx(layer, (torch.randn(13, 32), torch.tensor(ENDS)), tmp_path / "x.onnx")
    assert error is not None


class Text(torch.nn.Module):
    """A decoder of transformers over packed sequences, as its flash attention takes them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, input_ids: Any, position_ids: Any, cu_seqlens: Any) -> Any:
        longest = {"max_length_q": 7, "max_length_k": 7}
        starts = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        return self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **starts, **longest).logits


@pytest.mark.parametrize(
    ("name", "more"),
    [("Llama", {}), pytest.param("Mistral", {"sliding_window": 3}, marks=pytest.mark.slow)],
)
def test_decoders_of_transformers(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Each sequence is what it is by itself, and no mask is made."""
    transformers = pytest.importorskip("transformers")
    from decoders import _GROUPED

    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**_GROUPED, **more)
    ).eval()
    ends = [0, 5, 6, 13]
    ids = torch.randint(3, 99, (1, 13))
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(ends)])[None]
    starts = torch.tensor(ends, dtype=torch.int32)
    path = tmp_path / "text.onnx"
    report = flashonnx.export_onnx(
        Text(model), (ids, positions, starts), path, dynamic_shapes=({1: "tokens"}, {1: "tokens"}, {0: "ends"})
    )
    assert report.fused == report.total == 2, str(report)
    exported = onnx.load(path)
    assert {node.op_type for node in nodes(exported)} == {"FlashAttentionVarlen"}
    assert not {"CumSum", "LessOrEqual", "And", "Where"} & op_types(exported)
    assert [attributes(node).get("left_window_size") for node in nodes(exported)] == [2 if more else None] * 2
    with torch.no_grad():
        want = [model(input_ids=ids[:, a:b], use_cache=False).logits for a, b in itertools.pairwise(ends)]
    np.testing.assert_allclose(run(path, ids, positions, starts), torch.cat(want, 1).numpy(), atol=2e-5)
    backwards = torch.tensor([0, 7, 13], dtype=torch.int32)  # other sequences
    positions = torch.cat([torch.arange(7), torch.arange(6)])[None]
    with torch.no_grad():
        want = [model(input_ids=ids[:, a:b], use_cache=False).logits for a, b in ((0, 7), (7, 13))]
    np.testing.assert_allclose(run(path, ids, positions, backwards), torch.cat(want, 1).numpy(), atol=2e-5)


def test_packed_positions_alone_keep_their_mask(tmp_path: Path) -> None:
    """Without cu_seq_lens_q the mask says which tokens belong together, as before."""
    transformers = pytest.importorskip("transformers")
    from decoders import _GROUPED

    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_GROUPED)).eval()
    model.config.use_cache = False
    ids, positions = torch.randint(3, 99, (1, 13)), torch.cat([torch.arange(n) for n in (5, 1, 7)])[None]
    path = tmp_path / "text.onnx"
    report = flashonnx.export_onnx(
        model, (), path, kwargs={"input_ids": ids, "position_ids": positions},
        dynamic_shapes={"input_ids": {1: "tokens"}, "position_ids": {1: "tokens"}},
    )  # fmt: skip
    assert report.fused == report.total == 2 and "queries x keys" in str(report)
    with torch.no_grad():
        want = model(input_ids=ids, position_ids=positions).logits.numpy()
    np.testing.assert_allclose(run(path, ids, positions), want, atol=2e-5)


def test_images_of_qwen2_vl(tmp_path: Path) -> None:
    """Patches of several images in one sequence, whose layers attend as a whole only for flash attention."""
    pytest.importorskip("transformers")
    qwen = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    vision = pytest.importorskip("transformers.vision_utils")
    torch.manual_seed(0)
    config = qwen.Qwen2VLVisionConfig(
        depth=2, embed_dim=32, hidden_size=48, num_heads=4, in_channels=3, patch_size=4, spatial_merge_size=2,
        temporal_patch_size=2,
    )  # fmt: skip
    tower = qwen.Qwen2VisionTransformerPretrainedModel(config).eval()

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = tower

        def forward(self, patches: Any, position_ids: Any, cu_seqlens: Any) -> Any:
            return self.tower(patches, None, position_ids=position_ids, cu_seqlens=cu_seqlens).pooler_output

    def given(grid: Any) -> tuple[Any, Any, Any]:
        patches = torch.randn(int(grid.prod(-1).sum()), 96)
        return patches, vision.get_vision_position_ids(grid, 2), vision.get_vision_cu_seqlens(grid)

    grids = [torch.tensor(grid) for grid in ([[1, 4, 6], [1, 2, 4], [2, 4, 4]], [[1, 8, 2], [1, 4, 4]])]
    path = tmp_path / "tower.onnx"
    axes = ({0: "patches"}, {0: "patches"}, {0: "ends"})
    report = flashonnx.export_onnx(Tower().eval(), given(grids[0]), path, dynamic_shapes=axes)
    assert report.fused == report.total == 2, str(report)
    model = onnx.load(path)
    assert [node.op_type for node in nodes(model)] == ["FlashAttentionVarlen"] * 2
    assert [node.op_type for node in model.graph.node].count("Transpose") <= 2, (
        "none of a layer's tensors is transposed"
    )
    assert config._attn_implementation in (None, "sdpa", "eager"), "the model is as it was"
    for grid in grids:
        inputs = given(grid)
        with torch.no_grad():
            want = tower(inputs[0], grid).pooler_output.numpy()
        np.testing.assert_allclose(run(path, *inputs), want, atol=2e-5)


def test_arguments_that_contradict_each_other() -> None:
    q, ends = torch.randn(7, 2, 8), torch.tensor([0, 3, 7])
    with pytest.raises(ValueError, match=r"'cu_seqlens_k' is expected to have .* got 2 beside 3"):
        torch.ops.flashonnx.attention_varlen(q, q, q, ends, torch.tensor([0, 7]))
    with pytest.raises(ValueError, match=r"'cu_seqlens_q' is expected to have"):
        torch.ops.flashonnx.attention_varlen(q, q, q, ends[:0])
    with pytest.raises(ValueError, match="'scale' is expected to be positive"):
        torch.ops.flashonnx.attention_varlen(q, q, q, ends, scale=1e-50)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_sinks_in_another_type(kind: torch.dtype) -> None:
    """The library is given float32, which has to outlive the call."""
    q, ends, sinks = torch.randn(7, 4, 64).to(kind), torch.tensor([0, 3, 7]), torch.tensor([1.0, 2, 3, 4])
    op = torch.ops.flashonnx.attention_varlen
    for _ in range(5):
        assert torch.equal(op(q, q, q, ends, None, sinks.half()), op(q, q, q, ends, None, sinks))


def test_verify_draws_ends(tmp_path: Path) -> None:
    """A packed model that is wrong is told from the right one, by inputs that are drawn."""

    class Packed(torch.nn.Module):
        def __init__(self, causal: bool) -> None:
            super().__init__()
            self.causal = causal

        def forward(self, q: Any, k: Any, v: Any, cu: Any) -> Any:
            return torch.ops.flashonnx.attention_varlen(q, k, v, cu, is_causal=self.causal)

    given = *(torch.randn(13, 2, 8) for _ in range(3)), torch.tensor([0, 3, 13], dtype=torch.int32)
    axes = (*({0: "tokens"} for _ in range(3)), {0: "ends"})
    for causal in (True, False):
        flashonnx.export_onnx(Packed(causal).eval(), given, tmp_path / f"{causal}.onnx", dynamic_shapes=axes)
    assert flashonnx.verify(tmp_path / "True.onnx", tmp_path / "True.onnx").ok
    assert not flashonnx.verify(tmp_path / "True.onnx", tmp_path / "False.onnx").ok
