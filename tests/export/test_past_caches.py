"""fuse(kv_cache=...): decoders that join past and new keys, with caches instead; the same logits at every step."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
flashonnx = pytest.importorskip("flashonnx")
import decoders  # noqa: E402
from decoders import Original, Way  # noqa: E402
from flashonnx.export import fuse  # noqa: E402
from models import attributes, has_library, nodes, op_types, session  # noqa: E402

CAPACITY, STEPS = 40, 20
PROMPTS = ([5, 17, 33, 60, 2, 41, 7], [11, 8, 23])
WAYS = (
    *(Way(exporter, "sdpa") for exporter in ("torch", "TorchScript")),
    *(Way(exporter, "eager", positions=False) for exporter in ("torch", "TorchScript")),
    *(Way(exporter, "sdpa", mask=False, positions=False) for exporter in ("torch", "TorchScript")),
)
EVERYDAY = {("llama", WAYS[1]), ("gpt2", WAYS[4]), ("llama", WAYS[2]), ("opt", WAYS[0])}
MODELS = ("llama", "qwen2", "qwen3", "gemma", "phi", "gpt_neox", "gpt2", "opt")
MORE = ("mixtral", "falcon", "cohere", "olmo2", "stablelm", "gptj", "gpt_bigcode", "phi3")  # experts among them
EACH = [
    pytest.param(name, way, id=f"{name}-{way}", marks=[] if (name, way) in EVERYDAY else pytest.mark.slow)
    for name, way in (*itertools.product(MODELS, WAYS), *itertools.product(MORE, WAYS[:2]))
    if (name, way) != ("cohere", WAYS[1])  # which TorchScript cannot export
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Exports each decoder once in each way."""
    folder, done = tmp_path_factory.mktemp("past"), {}

    def of(name: str, way: Way) -> onnx.ModelProto:
        if (name, way) not in done:
            done[name, way] = decoders.export(name, way, folder / f"{name}-{way}.onnx")
        return done[name, way]

    return of


class Cached:
    """Runs a fused decoder step by step; its caches hold NaN where nothing was written."""

    def __init__(self, model: onnx.ModelProto, batch: int, *, library: bool, pages: Any = None) -> None:
        self.session = session(model, library=library)
        self.caches = {}
        for value in self.session.get_inputs():
            if value.name.startswith("past_"):
                sizes = {"batch": batch, "capacity": CAPACITY, "pages": 30, "page_size": 4}
                shape = [size if isinstance(size, int) else sizes[size] for size in value.shape]
                self.caches[value.name] = np.full(shape, np.nan, np.float32)
        self.lengths = np.zeros(batch, np.int64)
        self.more = {} if pages is None else {"block_table": pages}

    def step(self, ids: np.ndarray, counts: np.ndarray | int = 1) -> np.ndarray:
        """Logits of `ids`, of which sentence b has the first `counts[b]`."""
        given = {"input_ids": ids, "cache_lengths": self.lengths, **self.more, **self.caches}
        logits, *presents = self.session.run(None, given)
        self.caches = dict(zip(self.caches, presents, strict=True))
        self.lengths = self.lengths + counts
        return logits


def check(original: onnx.ModelProto, fused: onnx.ModelProto, pages: Any = None) -> None:
    """Two prompts of different lengths side by side give what each gives by itself, and 20 tokens more."""
    onnx.checker.check_model(fused, full_check=True)
    counts = np.array([len(prompt) for prompt in PROMPTS])
    ids = np.array([prompt + [0] * (counts.max() - len(prompt)) for prompt in PROMPTS])
    for library in (True,) if pages is not None else (False, True) if has_library() else (False,):
        alone, together = [Original(session(original)) for _ in PROMPTS], Cached(fused, 2, library=library, pages=pages)
        want = [run.step(np.array([prompt]))[0] for run, prompt in zip(alone, PROMPTS, strict=True)]
        got = together.step(ids, counts)
        for b, count in enumerate(counts):
            np.testing.assert_allclose(got[b, :count], want[b], atol=1e-4 * np.abs(want[b]).max())
        tokens = np.array([[row[-1].argmax()] for row in want])
        for _ in range(STEPS):
            want = [run.step(token[None])[0] for run, token in zip(alone, tokens, strict=True)]
            got = together.step(tokens)
            np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
            tokens = got.argmax(-1)


@pytest.mark.parametrize(("name", "way"), EACH)
def test_the_same_at_every_step(name: str, way: Way, exported: Any) -> None:
    original = exported(name, way)
    before = original.SerializeToString()
    fused, report = fuse(original, kv_cache="static")
    assert original.SerializeToString() == before
    assert report.fused == report.total == 2
    assert {node.op_type for node in nodes(fused)} == {"FlashAttentionKVCache"}
    routing = {"Softmax", "Where"} if name == "mixtral" else set()
    assert not ({"Softmax", "Where", "Trilu", "CumSum"} - routing) & op_types(fused), "no masks are left"
    inputs = [value.name for value in fused.graph.input]
    assert inputs[:3] == ["input_ids", "cache_lengths", "past_key_values.0.key"]
    if name == "opt":  # Q multiplied, no rotation: nothing is left between one product for all three and the node
        assert "Transpose" not in op_types(fused)
        found = [attributes(node) for node in nodes(fused)]
        assert [(each["qkv_layout"], round(each["scale"], 5)) for each in found] == [(b"gqa", 0.35355)] * 2
    check(original, fused)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sentences_padded_on_the_left(name: str, exported: Any) -> None:
    """What the original gives for a batch with an uneven attention_mask is what each sentence gets by its length."""
    original = exported(name, WAYS[1])
    fused, _ = fuse(original, kv_cache="static")
    counts = np.array([len(prompt) for prompt in PROMPTS])
    width = counts.max()
    left = np.array([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    right = np.array([prompt + [0] * (width - len(prompt)) for prompt in PROMPTS])
    mask = (np.arange(width) >= width - counts[:, None]).astype(np.int64)
    before, after = Original(session(original), 2), Cached(fused, 2, library=has_library())
    want, got = before.step(left, mask), after.step(right, counts)
    for b, count in enumerate(counts):
        np.testing.assert_allclose(got[b, :count], want[b, width - count :], atol=1e-4 * np.abs(want).max())
    tokens = want[:, -1:].argmax(-1)
    for _ in range(STEPS):
        want, got = before.step(tokens), after.step(tokens)
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
        tokens = want.argmax(-1)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_fused_before(name: str, exported: Any) -> None:
    """A file that was fused without caches gets them; one that has them is refused as what it is."""
    original = exported(name, WAYS[1])
    fused, _ = fuse(original)
    cached, report = fuse(fused, kv_cache="static")
    assert report.fused == 2
    assert {node.op_type for node in nodes(cached)} == {"FlashAttentionKVCache"}
    check(original, cached)
    with pytest.raises(ValueError, match=r"reads and writes a cache already: the file has the inputs"):
        fuse(cached, kv_cache="static")


def test_merged_decoders(exported: Any) -> None:
    """An If between the decoder with a past and the one for prompts: the first alone does both."""
    original = exported("gpt2", WAYS[1])
    prompt_only = onnx.ModelProto()
    prompt_only.CopyFrom(original)
    graph = prompt_only.graph
    pasts = [value for value in graph.input if value.name.startswith("past_")]
    for value in pasts:  # a past without keys
        graph.input.remove(value)
        heads, size = (value.type.tensor_type.shape.dim[axis].dim_value for axis in (1, 3))
        shape = onnx.helper.make_node("Concat", ["batch_of_ids", "heads_0_size"], [f"{value.name}/shape"], axis=0)
        empty = onnx.helper.make_node("ConstantOfShape", [f"{value.name}/shape"], [value.name])
        graph.node.insert(0, empty)
        graph.node.insert(0, shape)
    rest = onnx.helper.make_node("Constant", [], ["heads_0_size"], value_ints=[heads, 0, size])
    zero, one = (onnx.helper.make_node("Constant", [], [f"number_{n}"], value_ints=[n]) for n in (0, 1))
    ids = onnx.helper.make_node("Shape", ["input_ids"], ["shape_of_ids"])
    batch = onnx.helper.make_node("Slice", ["shape_of_ids", "number_0", "number_1"], ["batch_of_ids"])
    for node in (batch, ids, one, zero, rest):
        graph.node.insert(0, node)
    merged = _merged(original, prompt_only)
    onnx.checker.check_model(merged)
    fused, report = fuse(merged, kv_cache="static")
    assert report.fused == 2
    assert "use_cache_branch" not in [value.name for value in fused.graph.input]
    assert "If" not in op_types(fused)
    check(original, fused)
    with_more = _merged(original, prompt_only)
    with_more.graph.input.append(onnx.helper.make_tensor_value_info("frames", onnx.TensorProto.FLOAT, [1]))
    (branch,) = (a.g for a in with_more.graph.node[-1].attribute if a.name == "else_branch")
    branch.node.append(onnx.helper.make_node("Identity", ["frames"], ["of_frames"]))
    with pytest.raises(ValueError, match="reads frames besides"):
        fuse(with_more, kv_cache="static")


def _merged(with_past: onnx.ModelProto, without: onnx.ModelProto) -> onnx.ModelProto:
    """Both as branches of an If on use_cache_branch, as merged decoders are made."""
    branches = []
    for source, suffix in ((with_past, "then"), (without, "else")):
        named = onnx.ModelProto()
        named.CopyFrom(source)
        named = onnx.compose.add_prefix(named, f"{suffix}/", rename_inputs=False)
        graph = named.graph
        del graph.input[:]
        del graph.value_info[:]
        branches.append(graph)
    outputs = [value.name for value in with_past.graph.output]
    choose = onnx.helper.make_node(
        "If", ["use_cache_branch"], outputs, then_branch=branches[0], else_branch=branches[1]
    )
    flag = onnx.helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1])
    graph = onnx.helper.make_graph([choose], "merged", [*with_past.graph.input, flag], with_past.graph.output)
    return onnx.helper.make_model(graph, opset_imports=with_past.opset_import, ir_version=with_past.ir_version)


@pytest.mark.parametrize("exporter", [pytest.param("torch", marks=pytest.mark.slow), "TorchScript"])
def test_whisper(exporter: str, tmp_path: Path) -> None:
    """The decoder's own keys become caches; those of the encoder stay inputs."""
    original = decoders.export_whisper(exporter, tmp_path / "whisper.onnx")
    fused, report = fuse(original, kv_cache="static")
    assert report.fused == report.total == 4
    assert [node.op_type for node in nodes(fused)] == ["FlashAttentionKVCache", "FlashAttention"] * 2
    names = {value.name for value in fused.graph.input}
    random = np.random.default_rng(0)
    frames = {name: random.standard_normal((2, 4, 12, 8)).astype(np.float32) for name in names if ".encoder." in name}
    frames |= {name: np.zeros((2, 12, 32), np.float32) for name in names & {"frames"}}
    before = session(original)
    for library in (False, True) if has_library() else (False,):
        after = session(fused, library=library)
        pasts = [{n: np.zeros((1, 4, 0, 8), np.float32) for n in names if ".decoder." in n} for _ in range(2)]
        caches = {value.name: np.full((2, 4, CAPACITY, 8), np.nan, np.float32) for value in after.get_inputs()
                  if ".decoder." in value.name}  # fmt: skip
        pasts = [{name: past[name] for name in caches} for past in pasts]
        lengths, counts = np.array([0, 0]), np.array([5, 3])
        for _ in range(STEPS):
            ids = random.integers(3, 99, (2, counts.max()))
            logits, *presents = after.run(None, {"input_ids": ids, "cache_lengths": lengths, **frames, **caches})
            caches = dict(zip(caches, presents, strict=True))
            lengths = lengths + counts
            for b, count in enumerate(counts):
                alone = {name: x[b : b + 1] for name, x in frames.items()}
                want, *presents = before.run(None, {"input_ids": ids[b : b + 1, :count], **alone, **pasts[b]})
                pasts[b] = dict(zip(pasts[b], presents, strict=True))
                np.testing.assert_allclose(logits[b, :count], want[0], atol=1e-4 * np.abs(want).max())
            counts = np.array([1, 1])


@pytest.mark.skipif(not has_library(), reason="pages need the library")
def test_pages(exported: Any) -> None:
    fused, report = fuse(exported("llama", WAYS[1]), kv_cache="paged")
    assert "block_table" in report.notes[-1]
    pages = np.random.default_rng(0).permutation(30)[:20].reshape(2, 10).astype(np.int32)
    check(exported("llama", WAYS[1]), fused, pages)


@pytest.mark.parametrize(
    "kind", ["static", pytest.param("paged", marks=pytest.mark.skipif(not has_library(), reason="lib"))]
)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_generator_runs_it(device: str, name: str, kind: str, exported: Any) -> None:
    """flashonnx.generate takes such a file as one of export_onnx, and writes what the original would."""
    original = exported(name, WAYS[1])
    fused, _ = fuse(original, kv_cache=kind)
    exact = {"use_tf32": "0"} if device == "cuda" else None
    generator = flashonnx.generate.Generator(
        fused, batch=2, capacity=CAPACITY, page_size=4, device=device, provider_options=exact
    )
    assert generator.positions == {"gpt2": 64, "llama": None}[name]
    prompts = [*PROMPTS, [60]]
    result = generator(prompts, max_new_tokens=STEPS)
    for prompt, tokens in zip(prompts, result.tokens, strict=True):
        run = Original(session(original))
        logits, want = run.step(np.array([prompt])), []
        while len(want) < STEPS:
            want.append(int(logits[0, -1].argmax()))
            logits = run.step(np.array([want[-1:]]))
        assert tokens == want


def test_biases_that_grow_with_the_keys(exported: Any) -> None:
    """ALiBi: its numbers count from the first key of all; the report of fuse() without the option has it fused."""
    original = exported("bloom", Way("TorchScript", "eager", positions=False))
    with pytest.raises(ValueError, match="kv_cache: "):
        fuse(original, kv_cache="static")


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ('{"max_position_embeddings": 48, "rope_scaling": null}', 48),
        ('{"text_config": {"n_positions": 40}}', 40),
        ('{"max_position_embeddings": 48, "rope_scaling": {"type": "linear", "factor": 4.0}}', None),
        ('{"max_position_embeddings": "48"}', None),
        ("[48]", None),
        ("{", None),
        (None, None),
    ],
)
def test_positions_of_a_configuration_beside(
    config: str | None, count: int | None, exported: Any, tmp_path: Path
) -> None:
    """Rotary embeddings by a formula have no table; exporters leave config.json beside their files."""
    onnx.save(exported("llama", WAYS[1]), tmp_path / "model.onnx")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    fused, _ = fuse(tmp_path / "model.onnx", kv_cache="static")
    noted = {prop.key: prop.value for prop in fused.metadata_props}
    assert noted.get("flashonnx:max_positions") == (None if count is None else str(count))
