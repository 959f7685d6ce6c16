"""How `flashonnx.generate` draws a word: by the definition in float64, and as transformers keeps words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from flashonnx import _sampling  # noqa: E402
from flashonnx._sampling import Draw  # noqa: E402


def rows(logits: Any, how: Draw, randoms: list[Any]) -> list[int]:
    return _sampling.choose(_sampling.greatest(logits), lambda temperature: (logits, False), how, randoms)


def choose(logits: Any, how: Draw, random: Any) -> int:
    """Of one row."""
    (token,) = rows(logits[None], how, [random])
    return token


def chances(logits: Any, how: Draw) -> Any:
    """Of each word, in float64, by the words of `Draw`: one after the other, most likely first."""
    exact = torch.from_numpy(logits).double() / how.temperature
    order = sorted(range(len(exact)), key=lambda i: (-exact[i], i))[: how.top_k or None]
    kept, given, before = torch.full_like(exact, -torch.inf), exact[order].softmax(0), 0.0
    for i, chance in zip(order, given, strict=True):
        if before < how.top_p:
            kept[i] = exact[i]
        before += chance
    return kept.softmax(0).numpy()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("how", [Draw(0.7), Draw(0.7, 4), Draw(0.7, 0, 0.8), Draw(0.7, 4, 0.6), Draw(1.5, 3, 0.05)])
def test_draws_are_of_the_softmax(how: Draw, dtype: Any) -> None:
    """Frequencies against the definition, of the greatest or most likely alone if so asked."""
    random = np.random.default_rng(0)
    logits = random.standard_normal(12).astype(dtype)
    draws = 20_000
    counts = np.bincount([choose(logits, how, random) for _ in range(draws)], minlength=12)
    right = chances(logits, how)
    assert (right > 0).sum() == {Draw(0.7): 12, Draw(0.7, 4): 4, Draw(1.5, 3, 0.05): 1}.get(how, (right > 0).sum())
    assert (counts[right == 0] == 0).all()
    off = np.abs(counts - draws * right) / np.sqrt(draws * np.maximum(right * (1 - right), 1e-9))
    assert off[right > 0].max() < 4.5, off  # standard deviations


@pytest.mark.parametrize("top_k", [0, 1, 5, 300, 2000])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_what_may_be_drawn_among_many(top_k: int, top_p: float, dtype: Any) -> None:
    """As many words as models have: what transformers keeps, and the draw by the running sum."""
    random = np.random.default_rng(top_k)
    for words in (2000, 2001, 300):
        logits = random.permutation(np.unique((3 * random.standard_normal(words)).astype(dtype)))  # no equal ones
        k = min(top_k, len(logits))
        how = Draw(0.8, k, top_p)
        right = chances(logits, how)
        scores = torch.from_numpy(logits).float()[None] / 0.8
        if k:
            scores = transformers.TopKLogitsWarper(k)(None, scores)
        scores = transformers.TopPLogitsWarper(top_p)(None, scores)[0]
        assert (np.isfinite(scores.numpy()) == (right > 0)).all()
        for share in (0.0, *random.random(20), 1 - 2**-53):
            ends = right.cumsum()
            token = choose(logits, how, _Always(share))
            assert right[token] > 0
            assert ends[token] - right[token] - 1e-6 <= share * ends[-1] <= ends[token] + 1e-6


class _Always:
    """For a generator: the same number again and again."""

    def __init__(self, number: float) -> None:
        self.random = lambda: number


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_greedy_takes_the_first_of_the_greatest(dtype: Any) -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        logits = random.integers(-40, random.integers(-30, 40), 50).astype(dtype) / dtype(8)
        assert choose(logits, Draw(), random) == int(torch.from_numpy(logits).float().argmax())
        assert logits[: choose(logits, Draw(), random)].max(initial=-np.inf) < logits.max()
    for how in (Draw(), Draw(1.0), Draw(1.0, 2), Draw(1.0, 0, 0.5)):
        with pytest.raises(FloatingPointError, match="NaN"):
            choose(np.array([0, np.nan, 1], dtype), how, random)


@pytest.mark.parametrize("temperature", [1e-46, 1e-38])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_temperatures_below_float32(temperature: float, top_p: float) -> None:
    """As cold as it gets: the greatest."""
    logits = np.array([1, 2, 33, 2.5], np.float32)
    assert choose(logits, Draw(temperature, 0, top_p), np.random.default_rng(0)) == 2


@pytest.mark.parametrize("bits", [[0x3C00, 0xFE00, 0x4200], [0xFE00, 0xBC00, 0xBD00], [0x3C00, 0x7E00, 0x4200]])
def test_nan_of_either_sign(bits: list[int]) -> None:
    with pytest.raises(FloatingPointError, match="finite"):
        choose(np.array(bits, np.uint16).view(np.float16), Draw(), np.random.default_rng(0))


@pytest.mark.parametrize("logits", [[-0.0, 0.0], [-3, -1, -2], [-3, 5, -2, 5], [0.0, -0.0, -1], [-2, -2]])
def test_greatest_of_float16(logits: list[float]) -> None:
    assert choose(np.array(logits, np.float16), Draw(), np.random.default_rng(0)) == np.argmax(logits)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rows_are_chosen_apart(dtype: Any) -> None:
    """As each would be alone; rows without a positive number among others."""
    random = np.random.default_rng(0)
    logits = random.standard_normal((5, 300)).astype(dtype)
    logits[1] -= dtype(10)
    for how in (Draw(), Draw(0.9), Draw(2.0, 40, 0.9)):
        alone = [choose(row, how, np.random.default_rng(n)) for n, row in enumerate(logits)]
        assert rows(logits, how, [np.random.default_rng(n) for n in range(5)]) == alone
    logits[3, 7] = np.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        rows(logits, Draw(), [random] * 5)


@pytest.mark.parametrize("how", [Draw(0.7), Draw(0.7, 4), Draw(1.5, 0, 0.6), Draw(0.7, 9, 0.8)], ids=str)
def test_weights_are_as_good_as_logits(how: Draw) -> None:
    """Where somebody else makes exp((logit - greatest) / temperature), of which NaN has no greatest."""
    logits = np.random.default_rng(0).standard_normal((3, 1000), np.float32) * 3
    weights = np.exp((logits - logits.max(1, keepdims=True)) / np.float32(how.temperature))
    best = _sampling.greatest(logits)
    for seed in range(50):
        right = rows(logits, how, [np.random.default_rng(seed) for _ in range(3)])
        randoms = [np.random.default_rng(seed) for _ in range(3)]
        assert _sampling.choose(best, lambda temperature: (weights, True), how, randoms) == right
    weights[1, 5] = np.nan
    with pytest.raises(FloatingPointError, match="expected to be finite"):
        _sampling.choose(best, lambda temperature: (weights, True), how, randoms)
