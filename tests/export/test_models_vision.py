"""Models of images, of transformers, timm and diffusers: exported, fused, compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
from model_zoo.expect import check, parameters


@pytest.mark.parametrize("case", parameters("vision"))
def test_export(case: Any, tmp_path: Path) -> None:
    check(case, tmp_path)
