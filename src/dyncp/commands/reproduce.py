"""`dyncp reproduce`: the published figures and some of our own, as JSON, tables and pictures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tqdm import tqdm
from tyro.conf import Positional, arg

from dyncp.ir.arguments import whole_number
from dyncp.report.table import columns
from dyncp.reproduce.data import DATASETS, read_lengths
from dyncp.reproduce.figures import FIGURES
from dyncp.reproduce.fit import error_text, sensitivity
from dyncp.reproduce.micro import figure_13, figure_14
from dyncp.reproduce.page import put, section
from dyncp.reproduce.plots import canvas_type, draw
from dyncp.reproduce.points import Point, Scope
from dyncp.reproduce.summary import in_short
from dyncp.strategies.warm import warm_up

FIT = "fit"
ERRORS = """## How well the model fits

|ours / paper - 1| over the bars of figures 13 and 14. The constants were fitted to those of the baselines; the dyncp
rows compare dyncp with DCP's bars, and are no error."""


@dataclass(frozen=True)
class Command:
    """Make the paper's figures again on a modelled cluster, beside the paper's values.

    The paper's data sets cannot be had: lengths come from seeded distributions of about their shape, or from a file.
    Times are simulated. Results are kept in the folder, so that a second run only draws; they are computed anew
    where the planner or the model has changed. All of it takes about 15 minutes on one core, --quick about 2.
    `dyncp reproduce fit` says how well the model's constants fit the published bars, and what a change of each does.
    """

    figures: Annotated[Positional[tuple[str, ...]], arg(metavar="FIGURE")] = ()
    """Which: 13 to 20, 22, rivals, split, degree, machines, mixed, or fit; all but fit when left out."""
    batches: int | None = None
    """Batches of each point: 3, or 1 with --quick, when left out."""
    quick: bool = False
    """Fewer scales, masks and sizes."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("reproduction")
    """Folder for results."""
    page: Annotated[Path | None, arg(metavar="FILE")] = None
    """Page to write tables and pictures to; `reproduction.md` in the folder when left out."""
    lengths_file: Annotated[Path | None, arg(metavar="FILE")] = None
    """Real lengths in place of the distribution of --dataset: a JSON list, or one a line."""
    dataset: Annotated[str | None, arg(metavar="|".join(DATASETS))] = None
    """Only this data set."""
    seed: int = 0
    """Of lengths and their order."""


def run(command: Command) -> int:
    """Do what `Command` says."""
    unknown = [name for name in command.figures if name not in FIGURES and name != FIT]
    if unknown:
        raise ValueError(f"unknown figure {unknown[0]!r}; choose among {', '.join(FIGURES)} and {FIT}")
    scope = scope_of(command)
    canvas_type()  # rather fail now than after the first figure
    warm_up()
    page = command.page or command.out / "reproduction.md"
    drawn = [name for name in command.figures or FIGURES if name != FIT]
    for name in tqdm(command.figures or FIGURES, unit="figure", disable=None):
        if name == FIT:
            print(f"{error_text([*figure_13(scope), *figure_14(scope)])}\n\n{columns(sensitivity(scope))}")
            continue
        figure = FIGURES[name]
        points = figure.make(scope)
        write(command, name, points)
        picture = page.with_suffix("") / f"{name}.png"
        draw(figure, points, picture)
        kept = kept_points(command.out)
        summary = in_short(kept)
        if summary or not page.exists():  # an empty part keeps the place at the top
            put(page, "summary", summary)
        bars = [point for one in ("13", "14") for point in kept.get(one, [])]
        if bars:
            put(page, "errors", f"{ERRORS}\n\n```text\n{error_text(bars)}\n```")
        put(page, name, section(figure.title, figure.text, points, f"{picture.parent.name}/{picture.name}"))
    if drawn:
        print(f"wrote {page}, its pictures to {page.with_suffix('')} and numbers as JSON to {command.out}")
    return 0


def scope_of(command: Command) -> Scope:
    """What is asked for.

    Raises:
        ValueError: a number out of range, an unknown data set, or lengths without one.
    """
    if command.dataset is not None and command.dataset not in DATASETS:
        raise ValueError(f"unknown data set {command.dataset!r}; choose one of {', '.join(DATASETS)}")
    if command.lengths_file is not None and command.dataset is None:
        raise ValueError("got --lengths-file without --dataset; say which data set the lengths stand for")
    batches = command.batches if command.batches is not None else 1 if command.quick else 3
    return Scope.in_folder(
        command.out,
        batches=whole_number("batches", batches, 1),
        quick=command.quick,
        seed=whole_number("seed", command.seed, 0),
        datasets=tuple(DATASETS) if command.dataset is None else (command.dataset,),
        own=None if command.lengths_file is None else tuple(read_lengths(command.lengths_file)),
    )


def write(command: Command, name: str, points: list[Point]) -> None:
    """The points of a figure as JSON."""
    command.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps([point.figures() for point in points], indent=1)
    (command.out / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def kept_points(folder: Path) -> dict[str, list[Point]]:
    """All points that a folder has, by figure."""
    paths = {name: folder / f"{name}.json" for name in FIGURES}
    return {
        name: [Point.of(one) for one in json.loads(path.read_text(encoding="utf-8"))]
        for name, path in paths.items()
        if path.exists()
    }
