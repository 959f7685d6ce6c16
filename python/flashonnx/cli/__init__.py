"""The command `flashonnx`: fuse, export, unfuse, inspect, verify, bench, doctor.

Exit codes: 0 done, or the answer is yes; 1 the answer is no; 2 it could not be done, or it was asked for wrongly.
`--json` writes one JSON object to stdout and nothing else; progress, warnings and errors go to stderr.
"""

from __future__ import annotations

from flashonnx.cli._app import app, main

__all__ = ["app", "main"]
