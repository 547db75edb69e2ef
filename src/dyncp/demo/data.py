"""What the demo trains on: bytes of text files, each with a mask of its own."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import numpy as np

from dyncp.demo.config import MASK_DEFAULTS
from dyncp.ir.arrays import Ints
from dyncp.ir.mask import Mask
from dyncp.masks import from_spec, parse_spec

SNIFFED_BYTES = 1024  # a file with a zero byte among its first ones is not text
LEAST_TOKENS = 2  # a shorter document has nothing to predict


class TextFiles:
    """A map-style dataset: the bytes of text files.

    Args:
        paths: of the files.
        lengths: how many bytes of each are read.
    """

    def __init__(self, paths: list[Path], lengths: list[int]) -> None:
        self.paths = paths
        self.lengths = np.array(lengths, np.int64)

    @classmethod
    def below(cls, folder: Path | None, max_length: int, out: Path) -> TextFiles:
        """Every text file below a folder, hidden and installed packages' ones left out.

        Args:
            folder: where to look; Python's standard library (its `.py` files) when left out.
            max_length: no more bytes of a file are ever read.
            out: a folder below it that is left out too: what an earlier run wrote there is no document.

        Raises:
            ValueError: no folder, or no text in it.
        """
        root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
        if not root.is_dir():
            raise ValueError(f"{root} is not a folder; give one with text files in it")
        written = out.resolve()
        has_out = root.resolve() in written.parents
        files = sorted(root.rglob("*.py" if folder is None else "*"))
        paths = [
            path
            for path in files
            if _is_document(path, root) and not (has_out and path.resolve().is_relative_to(written))
        ]
        if not paths:
            raise ValueError(f"no text files of at least {LEAST_TOKENS} bytes in {root}")
        return cls(paths, [min(path.stat().st_size, max_length) for path in paths])

    def to_json(self) -> str:
        """The list of files as text. Processes hand it over: one that looked for itself might find others."""
        return json.dumps([[str(path), length] for path, length in zip(self.paths, self.lengths.tolist(), strict=True)])

    @classmethod
    def from_json(cls, text: str) -> TextFiles:
        """The reverse of `to_json`."""
        files = json.loads(text)
        return cls([Path(path) for path, _ in files], [length for _, length in files])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int, /) -> Ints:
        with self.paths[index].open("rb") as file:
            return np.frombuffer(file.read(int(self.lengths[index])), np.uint8)


class DocumentMasks:
    """A `MaskFunction`: every document has a mask kind of its own, drawn once and for all.

    Args:
        masks: kinds as in `DemoConfig.masks`.
        seed: of the draw.
    """

    def __init__(self, masks: tuple[str, ...], seed: int) -> None:
        self.specs = [parse_spec(MASK_DEFAULTS.get(mask, mask)) for mask in masks]
        self.seed = seed

    def __call__(self, index: int, length: int) -> Mask:
        draw = np.random.default_rng((self.seed, index)).integers(len(self.specs))
        return from_spec(self.specs[draw], length)


def _is_document(path: Path, root: Path) -> bool:
    below = path.relative_to(root).parts
    if any(part.startswith(".") or part in ("site-packages", "dist-packages") for part in below):
        return False
    if not path.is_file() or path.stat().st_size < LEAST_TOKENS:
        return False
    with path.open("rb") as file:
        return b"\0" not in file.read(SNIFFED_BYTES)
