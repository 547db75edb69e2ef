"""The `dyncp` command: finds the subcommand, reads its options, and turns bad input into one line and exit code 2."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import tyro

from dyncp import __version__

# name -> (module with `Command` and `run`, what it does); imported on first use: planning need not wait for torch
COMMANDS = {
    "demo": ("dyncp.commands.demo", "train a small model under per-batch plans and compare it with dense training"),
    "plan": ("dyncp.commands.plan", "plan one batch and say what the plan moves, or write it to a file"),
    "verify": ("dyncp.commands.verify", "execute a plan on simulated ranks and compare it with dense attention"),
}
BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; `sys.argv` when left out.

    Returns:
        The exit code: 0; 1 when a plan fails its check or its verification; 2 for bad input, which is described in one
        line on stderr.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else BAD_INPUT
    if words[0] == "--version":
        print(f"dyncp {__version__}")
        return 0
    try:
        return _run(words[0], words[1:])
    except ValueError as error:
        return _fail(str(error))
    except BrokenPipeError:  # `dyncp plan ... | head`; keep the interpreter from failing once more while it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        return _fail(f"{error.filename}: {error.strerror}")


def _run(name: str, words: list[str]) -> int:
    if name not in COMMANDS:
        raise ValueError(f"unknown command {name!r}; choose one of {', '.join(COMMANDS)} (see dyncp --help)")
    module = importlib.import_module(COMMANDS[name][0])
    code: int = module.run(_parse(module.Command, name, words))
    return code


def _parse(command: type, name: str, words: list[str]) -> Any:
    """The options as an instance of `command`. tyro draws a box around what is wrong; take the sentence out of it."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                command,
                prog=f"dyncp {name}",
                args=words,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
    lines = [line.strip(" │\r") for line in complaint.getvalue().splitlines() if not line.startswith(("╭", "╰"))]
    end = next((number for number, line in enumerate(lines) if line.startswith("──")), len(lines))
    sentence = " ".join(lines[:end]).removeprefix("Error parsing options: ")
    raise ValueError(f"{sentence} (see dyncp {name} --help)")


def _fail(message: str) -> int:
    print(f"dyncp: error: {' '.join(message.split())}", file=sys.stderr)
    return BAD_INPUT


def _usage() -> str:
    lines = ["usage: dyncp COMMAND [OPTIONS]", "", "commands:"]
    lines += [f"  {name:<8}{what}" for name, (_, what) in COMMANDS.items()]
    lines += ["", "dyncp COMMAND --help lists a command's options; dyncp --version prints the version."]
    return "\n".join(lines)
