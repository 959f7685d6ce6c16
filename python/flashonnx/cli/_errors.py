"""How errors are told: one line, in the words of whoever knows best, without where in whose sources."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ORT_CODE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
_ORT_NODE = re.compile(r"while running (?P<op>\w+) node\. Name:'(?P<name>[^']*)' Status Message: (?P<message>.+)")
_ORT_SOURCE = re.compile(r"/\S+:\d+ [^()]*\([^()]*\)(?: const)?\s+")  # file, line and function
_KNOWN = (OSError, ValueError, TypeError, ImportError, RuntimeError, NotImplementedError)


class StdoutError(Exception):
    """What a command says cannot be written; that is not an error of what it did."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"what was to be said could not be written to stdout: {error.strerror}")
        self.is_closed_pipe = error.errno == errno.EPIPE

    def exit_code(self) -> int:
        """That of other programs at a pipe that nobody reads any more, else 2; nothing is written after it."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what waits would be tried again at exit
        return 128 + signal.SIGPIPE if self.is_closed_pipe else 2


def told(error: Exception) -> str:
    """What an error says, with its notes, and what kind of error it is if that is not one that we expect."""
    if hasattr(error, "format_message"):  # one of usage, which typer would tell itself
        return str(error.format_message())
    text = _COLOURS.sub("", str(error)).strip() or type(error).__name__
    known = isinstance(error, _KNOWN)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif _ORT_CODE.match(text):
        text, known = f"ONNX Runtime: {of_onnxruntime(text)}", True
    elif "## Exception summary" in text:  # torch's exporter, which says much: what was done, and why it failed
        before, _, after = text.partition("## Exception summary")
        parts = [part.strip().splitlines()[0] for part in (before, after) if part.strip()]
        if notes := getattr(error, "__notes__", ()):  # what to do, which is known; torch's words are only the proof
            return f"{' '.join(notes)} (torch.export: {parts[-1]:.100} ...)"
        text = " ".join(parts)
    text = ": ".join([text, *getattr(error, "__notes__", ())])
    return text if known else f"{type(error).__name__}: {text}"


def of_onnxruntime(text: str) -> str:
    """A message of ONNX Runtime: the node, if it names one, and what is wrong."""
    text = _ORT_CODE.sub("", text)
    if found := _ORT_NODE.search(text):
        node = f"{found['op']} '{found['name']}'" if found["name"] else found["op"]
        text = found["message"] if found["message"].startswith(f"{node}: ") else f"{node}: {found['message']}"
    return " ".join(_ORT_SOURCE.sub(" ", text).partition(" ; GPU=")[0].split())  # behind it: where, once more


def open_standard_files() -> None:
    """A standard file that the shell closed becomes /dev/null: the next file to be opened would else get its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - for as long as the program runs
