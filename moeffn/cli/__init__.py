"""The command line. A command's module is imported only when that command runs, so `moeffn --help` imports none.

A command module has `register(app)`, which adds its command (or commands) to a typer app, and imports torch inside
its functions. User errors are ValueError, TypeError and OSError whose message names the argument, what was expected
and what came: they are printed on one line and end the process with code 2. Anything else is our fault and keeps its
traceback.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import typer

# name: (module with `register(app)`, the line that `moeffn --help` shows)
COMMANDS = {
    "doctor": ("moeffn.cli.doctor", "Which backends run here and why others do not; versions, CPU features, threads."),
    "demo": ("moeffn.cli.demo", "Replace, upcycle and train the FFNs of a pretrained text encoder; shows the figures."),
    "params": ("moeffn.accounting.commands", "Total and active weights of a model, and where they are."),
    "plan": ("moeffn.accounting.commands", "Expert parallelism of a model over a cluster: traffic, memory, bounds."),
    "check": ("moeffn.cli.check", "The promises of the runtime, tried here: on a device, or over ranks with --ep."),
    "tune": ("moeffn.cli.tune", "Measure Triton tiles of a layer on this GPU; write those that beat the shipped ones."),
    "bench": ("moeffn.cli.bench", "Speed of one MoE block at the real size of a public model, checked and measured."),
}
_READABLE = re.compile(r": expected .+, got ", re.DOTALL)


class UserError(ValueError):
    """An error of the command line that is the user's to mend: printed on one line, exit code 2."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run `moeffn` with `argv` (default: the process's arguments) and end the process with its exit code."""
    args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        app = build_app(next((a for a in args if not a.startswith("-")), None))
        sys.exit(app(args, prog_name="moeffn", standalone_mode=False) or 0)
    except Exception as error:
        if os.environ.get("MOEFFN_TRACEBACK"):
            raise
        if hasattr(error, "format_message"):  # click's own: an unknown option, a value of the wrong type
            fail(error.format_message())
        if type(error).__name__ == "Abort":
            sys.exit(1)
        if not is_user_error(error):
            raise
        fail(str(error))


def is_user_error(error: Exception) -> bool:
    """True for the errors of `moeffn.checks`, `UserError` and unreadable files."""
    if isinstance(error, (UserError, OSError)):
        return True
    return isinstance(error, (ValueError, TypeError)) and bool(_READABLE.search(str(error)))


def fail(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), " ".join(message.split())))
    sys.exit(2)


def build_app(command: str | None) -> typer.Typer:
    """The app with `command` alone registered when it exists, else with a line for each command (help, mistypings)."""
    app = typer.Typer(name="moeffn", add_completion=False, pretty_exceptions_enable=False,
                      help="A sparse mixture-of-experts FFN runtime for PyTorch.")
    app.callback()(_root)
    if command in COMMANDS:
        importlib.import_module(COMMANDS[command][0]).register(app)
        for info in app.registered_commands:  # typer keeps the line ends of a docstring, which are not the terminal's
            info.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(info.callback) or "")
    else:
        for name, (_, line) in COMMANDS.items():
            app.command(name, help=line)(_listed)
    return app


def _root(version: bool = typer.Option(False, "--version", help="Print the version and stop.", is_eager=True,
                                       callback=lambda value: _print_version(value))) -> None:
    pass


def _print_version(value: bool) -> None:
    if value:
        from .. import __version__

        typer.echo(f"moeffn {__version__}")
        raise typer.Exit


def _listed() -> Any:
    raise AssertionError("a command that is only listed was run")
