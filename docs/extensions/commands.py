"""The reference of the command line, from the commands themselves."""

import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from jobs.cli import app


def commands() -> str:
    """Markdown: one section a command, with its arguments and options."""
    return "\n".join(
        line for path, command in _leaves("headwater", get_command(app)) for line in _section(path, command)
    )


def _leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield path, command
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _leaves(f"{path} {name}", inner)


def _section(path: str, command: Any) -> Iterator[str]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    usage = [path, *(["[OPTIONS]"] if options else []), *(_argument(one) for one in arguments)]
    yield from (f"## {path}", "", "```text", " ".join(usage), "```", "", _prose(command.help or ""), "")
    if arguments:
        yield from ("| argument | |", "|---|---|")
        yield from (f"| `{one.name.upper()}` | {_cell(one.help)} |" for one in arguments)
        yield ""
    if options:
        yield from ("| option | default | |", "|---|---|---|")
        for one in options:
            names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
            yield f"| {names} | {_default(one)} | {_cell(one.help)} |"
        yield ""


def _argument(argument: Any) -> str:
    name = argument.name.upper() + ("..." if argument.nargs != 1 else "")
    return name if argument.required else f"[{name}]"


def _default(option: Any) -> str:
    value = option.default
    if callable(value) or value is None or isinstance(value, bool) or value in ("", (), []):
        return "required" if option.required else ""
    return f"`{value}`"


def _prose(text: str) -> str:
    return re.sub(r"\s*\n(?!\n)\s*", " ", text.replace("\f", "")) if "\n\n" not in text else text


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", r"\|").replace("<", "&lt;")
