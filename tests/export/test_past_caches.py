"""fuse(kv_cache=...): decoders that join past and new keys, with caches instead; the same logits at every step."""

from __future__ import annotations

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
from models import has_library, nodes, op_types, session  # noqa: E402

CAPACITY, STEPS = 40, 20
PROMPTS = ([5, 17, 33, 60, 2, 41, 7], [11, 8, 23])
WAYS = (
    *(Way(exporter, "sdpa") for exporter in ("torch", "TorchScript")),
    *(Way(exporter, "eager", positions=False) for exporter in ("torch", "TorchScript")),
    *(Way(exporter, "sdpa", mask=False, positions=False) for exporter in ("torch", "TorchScript")),
)
EVERYDAY = {("llama", WAYS[1]), ("gpt2", WAYS[4]), ("llama", WAYS[2])}
MODELS = ("llama", "qwen2", "qwen3", "gemma", "phi", "gpt_neox", "gpt2", "opt")
EACH = [
    pytest.param(name, way, id=f"{name}-{way}", marks=[] if (name, way) in EVERYDAY else pytest.mark.slow)
    for name in MODELS
    for way in WAYS
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
    assert not {"Softmax", "Where", "Trilu", "CumSum"} & op_types(fused), "no masks are left"
    inputs = [value.name for value in fused.graph.input]
    assert inputs[:3] == ["input_ids", "cache_lengths", "past_key_values.0.key"]
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
