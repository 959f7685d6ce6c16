"""A Generator as a server uses it: ends of the cache, requests that end early, one call after another."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")
from flashonnx.generate import Generator
from test_generate import NEW, PROMPTS, exported, wanted

__all__ = ["exported", "wanted"]
KINDS = ("static", "paged")


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, exported: Any) -> Any:
    """Generators of the same model, with its caches in one piece and in pages."""
    return lambda **sizes: Generator(exported("llama", request.param)[1], **{"device": "cpu", **sizes})


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_the_cache_is_filled_to_its_last_key(chunk: int, make: Any, wanted: Any) -> None:
    """The longest request ends there while shorter ones read and write beside it; what they get is the same."""
    longest = max(map(len, PROMPTS)) + NEW - 1
    generator = make(batch=len(PROMPTS), capacity=longest, chunk=chunk, page_size=4)
    assert generator(PROMPTS, NEW).tokens == wanted["llama"]
    with pytest.raises(ValueError, match=f"prompt 2 needs {longest + 1} keys for 20 tokens and {NEW + 1} new ones"):
        generator(PROMPTS, NEW + 1)


def test_a_prompt_as_long_as_the_cache(make: Any, wanted: Any) -> None:
    """It has room for one token, which needs no key; one more is refused before anything runs or is told."""
    told: list[tuple[int, int]] = []
    generator = make(batch=2, capacity=len(PROMPTS[2]), chunk=8, page_size=4)
    tell = lambda *token: told.append(token)  # noqa: E731
    assert generator([PROMPTS[2]], 1, callback=tell).tokens == [wanted["llama"][2][:1]]
    del told[:]
    for prompts in ([PROMPTS[1], PROMPTS[2]], [PROMPTS[1], [*PROMPTS[2], 5]]):
        with pytest.raises(ValueError, match=r"prompt 1 needs 2[12] keys .* there are 20"):
            generator(prompts, 2 if len(prompts[1]) == 20 else 1, callback=tell)
    assert not told
    assert generator(PROMPTS[1:2], 5).tokens == [wanted["llama"][1][:5]]


def test_nothing_to_do(make: Any) -> None:
    result = make(capacity=8)([], 5)
    assert (result.tokens, result.finished, result.prompt_tokens, result.tokens_per_second) == ([], [], 0, 0.0)
    with pytest.raises(
        ValueError, match=r"prompt 1 is expected to be a list of token numbers, at least one, got shape"
    ):
        make(capacity=8)([[1], np.zeros(0, np.int64)], 5)


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_stops_in_the_middle_of_a_batch(batch: int, make: Any, wanted: Any) -> None:
    """At the first token, amid, and never: the others do not notice, and every place is used again."""
    want = wanted["llama"]
    stop = {want[1][0], want[4][7]}
    cut = [next((i + 1 for i, token in enumerate(tokens) if token in stop), NEW) for tokens in want]
    assert cut[1] == 1 and len(set(cut)) > 2
    generator = make(batch=batch, capacity=40, chunk=4, page_size=4)
    for _ in range(2):
        result = generator(PROMPTS, NEW, stop=stop)
        assert result.tokens == [tokens[:n] for tokens, n in zip(want, cut, strict=True)]
        assert result.finished == ["stop" if tokens[-1] in stop else "length" for tokens in result.tokens]


def test_a_consumer_that_has_enough(make: Any, wanted: Any) -> None:
    """True from the callback ends its request alone; what else it returns is nothing."""
    want, told = wanted["llama"], [[] for _ in PROMPTS]  # type: ignore[var-annotated]

    def tell(prompt: int, token: int) -> object:
        told[prompt].append(token)
        return len(told[prompt]) == 3 if prompt in (0, 3) else 1  # as what a file's write returns

    result = make(batch=2, capacity=40, page_size=4)(PROMPTS, NEW, callback=tell)
    assert result.tokens == told == [tokens[: 3 if i in (0, 3) else NEW] for i, tokens in enumerate(want)]
    assert result.finished == ["callback" if i in (0, 3) else "length" for i in range(len(want))]


def test_a_comparison_of_numpy_ends_a_request(make: Any, wanted: Any) -> None:
    """Its True is another object than Python's, and its other numbers are no answer."""
    generator, first = make(capacity=40, page_size=4), wanted["llama"][0]
    last = np.array(first[2])
    ended = generator(PROMPTS[:1], NEW, callback=lambda _, token: last == token)
    assert (ended.tokens, ended.finished) == ([first[: first.index(first[2]) + 1]], ["callback"])
    assert generator(PROMPTS[:1], NEW, callback=lambda *_: np.int64(1)).finished == ["length"]


def test_a_consumer_that_is_gone(make: Any, wanted: Any) -> None:
    """What a callback raises ends the call, and the next one finds the generator as it was."""
    generator = make(batch=2, capacity=40, page_size=4, pages=15)

    def tell(prompt: int, token: int) -> None:
        if prompt == 1:
            raise BrokenPipeError

    for _ in range(3):  # pages that were not given back would soon be missed
        with pytest.raises(BrokenPipeError):
            generator(PROMPTS, NEW, callback=tell)
    assert generator(PROMPTS, NEW).tokens == wanted["llama"]


def test_one_call_at_a_time(make: Any, wanted: Any) -> None:
    """Its caches are in use, so a second call is refused, from a callback or another thread; the first goes on."""
    generator = make(batch=2, capacity=40)
    refused: list[str] = []

    def again(prompt: int, token: int) -> None:
        def call() -> None:
            with pytest.raises(RuntimeError, match="running already, and its caches hold one call at a time") as raised:
                generator([[1]], 1)
            refused.append(str(raised.value))

        if not refused:
            call()
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

    assert generator(PROMPTS, NEW, callback=again).tokens == wanted["llama"]
    assert len(refused) == 2


def test_seeds(make: Any) -> None:
    """The same call draws the same again, also with others between; another seed, or another place, does not."""
    generator = make(batch=3, capacity=40)
    how = {"temperature": 1.5, "top_p": 0.95}
    first = generator(PROMPTS, NEW, seed=7, **how).tokens
    generator(PROMPTS[::-1], NEW)
    assert generator(PROMPTS, NEW, seed=7, **how).tokens == first
    assert generator(PROMPTS, NEW, seed=8, **how).tokens != first
    twice = generator([PROMPTS[0], PROMPTS[0]], NEW, seed=7, **how).tokens
    assert twice[0] == first[0] != twice[1], "equal prompts are drawn for apart"
    cut = generator(PROMPTS, 5, seed=7, **how).tokens
    assert cut == [tokens[:5] for tokens in first]


def test_what_a_tokenizer_returns(make: Any) -> None:
    from transformers import BatchEncoding

    with pytest.raises(TypeError, match="got a BatchEncoding of input_ids, attention_mask: give its 'input_ids'"):
        make(capacity=8)(BatchEncoding({"input_ids": [[1]], "attention_mask": [[1]]}), 5)
