"""The `dyncp` command: finds the subcommand, reads its options, and turns bad input into one line and exit code 2."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import tyro

from dyncp import __version__
from dyncp.ir.plan import PlanError

# name -> (module with `Command` and `run`, what it does); imported on first use: planning need not wait for torch
COMMANDS = {
    "demo": ("dyncp.commands.demo", "train a small model under per-batch plans and compare it with dense training"),
    "plan": ("dyncp.commands.plan", "plan one batch and say what the plan moves, or write it to a file"),
    "show": ("dyncp.commands.show", "check a plan file and say what the plan moves"),
    "verify": ("dyncp.commands.verify", "execute a plan on simulated ranks and compare it with dense attention"),
    "simulate": ("dyncp.commands.simulate", "simulate a batch on a cluster, under one strategy or several"),
    "tune": ("dyncp.commands.tune", "say what to expect of each strategy on a data set, and which settings to use"),
    "reproduce": ("dyncp.commands.reproduce", "make the published figures again on a modelled cluster"),
    "planner": ("dyncp.commands.planner", "plan for a training job on this host, ahead of its ranks"),
    "bench": ("dyncp.commands.bench", "measure planning over a corpus of batches"),
    "store": ("dyncp.commands.store", "host plans for planners and trainers on other machines"),
}
BROKEN, BAD_INPUT, INTERRUPTED = 1, 2, 130  # the last as shells have it
LONGEST_LINE = 1000  # characters of an error message


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; `sys.argv` when left out.

    Returns:
        The exit code: 0; 1 when a plan fails its check or its verification; 2 for bad input, which is described in one
        line on stderr; 130 after ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else BAD_INPUT
    if words[0] == "--version":
        print(f"dyncp {__version__}")
        return 0
    try:
        code = _run(words[0], words[1:])
        sys.stdout.flush()  # a full disk shows here, not after the last handler
        return code
    except PlanError as error:  # more than one line, with a table of ranks by steps, and not the user's mistake
        print(f"dyncp: the plan is broken: {error}", file=sys.stderr)
        return BROKEN
    except ValueError as error:
        return _fail(str(error))
    except MemoryError:
        return _fail("out of memory; use larger blocks, fewer ranks, or a smaller batch")
    except KeyboardInterrupt:
        print("\ndyncp: interrupted", file=sys.stderr)  # a progress bar may stand on the line
        return INTERRUPTED
    except BrokenPipeError:  # `dyncp plan ... | head`
        _abandon_stdout()
        return 0
    except OSError as error:
        if error.filename is None:
            _abandon_stdout()
        return _fail(": ".join(str(part) for part in (error.filename, error.strerror or error) if part))


def _abandon_stdout() -> None:
    """Keep the interpreter from failing once more while it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    raise ValueError(f"{_named(_sentence(complaint.getvalue()), command)} (see dyncp {name} --help)")


def _sentence(complaint: str) -> str:
    """The first part of a box of parts with rules between; its title is in its frame, or the part above without one."""
    parts: list[list[str]] = [[]]
    for line in (line.strip(" │\r") for line in complaint.splitlines()):
        if line and not line.strip("-─"):
            parts.append([])
        elif line and not line.startswith(("╭", "╰")):
            parts[-1].append(line)
    framed = "╭" in complaint or len(parts) == 1
    return " ".join(parts[0 if framed else 1])


def _named(sentence: str, command: type) -> str:
    """What tyro says names the class that refused its values; name the option instead, where the reason has a field."""
    found = re.fullmatch(r"Error parsing (\S+): (.*)", sentence)
    if not found:
        return sentence
    where, reason = found.groups()
    group = get_type_hints(command).get(where)
    options = [field.name for field in fields(group if is_dataclass(group) else command)]
    words = (word for word in re.findall(r"\w+", reason) if word in options)
    if not where.startswith("--"):
        where = "--" + next(words, "").replace("_", "-")
    return reason if where == "--" else f"{where}: {reason}"


def _fail(message: str) -> int:
    line = " ".join(message.split())
    if len(line) > LONGEST_LINE:  # it quotes what was got, and that can be a whole file
        line = f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 2 :]}"
    print(f"dyncp: error: {line}", file=sys.stderr)
    return BAD_INPUT


def _usage() -> str:
    lines = ["usage: dyncp COMMAND [OPTIONS]", "", "commands:"]
    lines += [f"  {name:<10}{what}" for name, (_, what) in COMMANDS.items()]
    lines += ["", "dyncp COMMAND --help lists a command's options; dyncp --version prints the version."]
    return "\n".join(lines)
