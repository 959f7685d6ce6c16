"""The table of docs/fusion.md is of the models that are tested."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
from model_zoo import table
from model_zoo.cases import EVERYDAY, FAMILIES, cases


def test_the_table_has_every_export_and_no_other() -> None:
    written = table.expected()
    ids = [case.id for case in cases()]
    assert sorted(written) == sorted(ids)
    assert len(set(ids)) == len(ids) >= 60


def test_the_table_counts_what_there_is() -> None:
    written = table.expected()
    for case in cases():
        fused, found = written[case.id]
        assert fused <= found == case.entry.sites, case.id


def test_the_everyday_exports_exist_and_each_family_has_some() -> None:
    assert {case.id for case in cases()} >= EVERYDAY
    for family in FAMILIES:
        assert EVERYDAY & {case.id for case in cases(family)}, family
