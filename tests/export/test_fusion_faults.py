"""Every public fault of fusions that is known to us, and the tests of its whole kind; ../test_faults.py has others."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FAULTS = {
    "casts-around-softmax": (
        "test_rules.py::test_casts_around_softmax", "test_rules.py::test_casts_behind_the_product",
    ),
    "scale-everywhere": ("test_rules.py::test_scale_everywhere", "test_rules.py::test_scale_computed_from_the_shape"),
    "probabilities-used": ("test_rules.py::test_probabilities_used", "test_rules.py::test_probabilities_used_inside"),
    "interleaved-padding": ("test_masks.py::test_interleaved_and_whole_padding",),
    "all-masked-sentence": ("test_masks.py::test_interleaved_and_whole_padding", "test_zoo.py::test_rows_without_keys"),
    "heads-not-guessable": (
        "test_layouts.py::test_heads_only_from_a_dynamic_reshape", "test_layouts.py::test_heads_not_known",
    ),
    "shared-mask-across-layers": ("test_masks.py::test_shared_by_layers",),
    "isnan-guard": ("test_rules.py::test_isnan_guard", "test_softmaxes.py::test_nan_that_is_caught"),
    "dynamic-shapes-kept": ("test_rules.py::test_plain", "test_structure_random.py::test_same_answers"),
    "gqa-expand": ("test_layouts.py::test_repeated_heads", "test_zoo.py::test_key_heads_stay_few"),
    "t5-bias": ("test_masks.py::test_two_masks",),
    "softmax-not-attention": (
        "test_rules.py::test_softmax_not_attention", "test_rules.py::test_softmax_over_another_axis",
        "test_sites.py::test_no_attention",
    ),
    # Of caches: what other tools got wrong, or we did.
    "batch-as-large-as-heads": ("test_past_rows.py::test_as_many_sentences_as_heads",),
    "tokens-that-look-at-padding": ("test_past_rows.py::test_refused", "test_past_rows_random.py::test_taken_is_right"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_has_its_tests(fault: str) -> None:
    for name in FAULTS[fault]:
        file, _, function = name.partition("::")
        tree = ast.parse((Path(__file__).parent / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name
