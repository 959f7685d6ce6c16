"""What mkdocs does besides: pages link to samples and benchmarks outside docs/, so these are on the site too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent
OUTSIDE = ("benchmarks/README.md", "benchmarks/results/*", "samples/README.md", "samples/*/*.*")


def on_files(files: Files, config: Any) -> Files:
    """Adds them, at the paths that they have in the repository."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            file = File(name, str(ROOT), config.site_dir, config.use_directory_urls)
            file.inclusion = InclusionLevel.NOT_IN_NAV if path.suffix == ".md" else InclusionLevel.INCLUDED
            files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """In the repository docs/ is a folder beside them, on the site it is the root."""
    if "/" in page.file.src_uri:
        return re.sub(r"\]\(((?:\.\./)+)docs/", r"](\1", markdown)
    return markdown.replace("](../", "](")
