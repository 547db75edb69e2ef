"""The lengths of a data set: from a file of numbers, a folder of text files, or a Hugging Face data set."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dyncp.demo.data import TextFiles
from dyncp.ir.arguments import MAX_COUNT, positive_number, whole_numbers

BYTES_PER_TOKEN = 4.0  # of English text under a vocabulary of 128K tokens, about
MOST_SAMPLES = 100_000  # of a Hugging Face data set that are read
EXPECTED = "expected a JSON list of lengths, as [512, 4096], or a number on each line"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of every sample, and where they come from, in words."""

    tokens: tuple[int, ...]
    source: str


def read_lengths(source: str, bytes_per_token: float = BYTES_PER_TOKEN, column: str = "text") -> Lengths:
    """The lengths that a source has.

    Args:
        source: a file (a JSON list, or a number on each line), a folder (text files below it), or the name of a Hugging
            Face data set, whose split `train` is read.
        bytes_per_token: by which bytes of text are taken as tokens.
        column: of a Hugging Face data set, that has the text.

    Raises:
        ValueError: none of these, or nothing in it.
    """
    positive_number("bytes_per_token", bytes_per_token)
    path = Path(source)
    rule = f"{bytes_per_token:g} bytes a token"
    if path.is_dir():
        sizes = TextFiles.below(path, MAX_COUNT, path / ".nothing").lengths.tolist()
        return Lengths(_tokens(sizes, bytes_per_token), f"text files in {source}, {rule}")
    if path.is_file():
        return Lengths(_numbers(path), f"lengths in {source}")
    sizes = _hugging_face(source, column)
    return Lengths(_tokens(sizes, bytes_per_token), f"{source}, {column}, {rule}")


def _tokens(sizes: list[int], bytes_per_token: float) -> tuple[int, ...]:
    return tuple(max(1, round(size / bytes_per_token)) for size in sizes)


def _numbers(path: Path) -> tuple[int, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text; expected a JSON list of lengths, or a number on each line") from error
    numbers = whole_numbers(f"{path}", _values(path, text), 1)
    if not numbers:
        raise ValueError(f"{path} has no lengths; {EXPECTED}")
    return tuple(numbers)


def _values(path: Path, text: str) -> Any:
    first = text.lstrip()[:1]
    if first == "{":
        raise ValueError(f"{path} has JSON objects in it; {EXPECTED}")
    if first == "[":
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path} begins like a JSON list, but is no JSON: {error}; {EXPECTED}") from error
    values = []
    for word in text.split():
        try:
            values.append(int(word))
        except ValueError:
            raise ValueError(f"{path} has no lengths: {word[:40]!r} is not a whole number; {EXPECTED}") from None
    return values


def _hugging_face(name: str, column: str) -> list[int]:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ValueError(
            f"{name} is neither a file nor a folder; if it is a Hugging Face data set, install what reads it: "
            "pip install datasets"
        ) from None
    try:
        rows = datasets.load_dataset(name, split="train", streaming=True)
        sizes = [len(row[column].encode()) for row in islice(rows, MOST_SAMPLES)]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"cannot read column {column!r} of the data set {name}: {error}") from error
    if not sizes:
        raise ValueError(f"the data set {name} is empty")
    return sizes
