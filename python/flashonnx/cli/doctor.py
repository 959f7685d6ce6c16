"""`flashonnx doctor`."""

from __future__ import annotations

from typing import Any

import typer
from rich.text import Text

from flashonnx.cli._output import Json, emit, say, working

_MARKS = {
    "ok": ("✓", "bold green"),
    "absent": ("–", "dim"),
    "warning": ("!", "bold yellow"),
    "wrong": ("✗", "bold red"),
}


def doctor(json: Json = False) -> None:
    """What is installed here, what works, and what to do about the rest.

    Each runtime is tried, not only looked for: an attention is computed by it and compared with NumPy. Exits with 1 if
    something is wrong; that something is absent is not wrong.
    """
    from flashonnx.cli._checks import every

    checks = []
    with working("examining this machine"):
        from flashonnx._progress import step

        for name, examine in every().items():
            step(name)
            checks.append(examine())
    wrong = [check for check in checks if check.state == "wrong"]
    if json:
        emit({"ok": not wrong, "checks": [check.content() for check in checks]})
    else:
        for check in checks:
            _tell(check)
        works = [check.name for check in checks if check.state == "ok"]
        say("")
        if wrong:
            say(f"{len(wrong)} to mend: {', '.join(check.name for check in wrong)}", "bold red")
            if wrong[0].todo:  # the others may come of it
                say(f"first {wrong[0].name}: {wrong[0].todo}", "red")
        else:
            say(f"Nothing is wrong here. It works: {', '.join(works)}.", "bold green")
    if wrong:
        raise typer.Exit(1)


def _tell(check: Any) -> None:
    sign, style = _MARKS[check.state]
    line = Text.assemble(
        (f"{sign} ", style), (f"{check.name:<18}", "bold"), (check.found, "dim" if sign == "–" else "")
    )
    say(line)
    if check.todo:
        say(Text(f"{'':<20}→ {check.todo}", "yellow" if check.state != "absent" else "dim"))
