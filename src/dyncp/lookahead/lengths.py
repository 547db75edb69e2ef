"""How long the samples of a map-style dataset are: given, told, measured where they lie, or read one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from dyncp.ir.arrays import Ints
from dyncp.lookahead.config import Batching
from dyncp.lookahead.length_cache import LengthCache

PROGRESS_AFTER_S = 5.0  # reading a small dataset needs no bar
# What Hugging Face datasets call the formats in which a sample has the tokens of its row; others make other samples.
ROW_FORMATS = (None, "python", "numpy", "torch", "jax", "tensorflow")


class MapDataset(Protocol):
    """A map-style dataset, as PyTorch has it. A sample is a 1-D array, tensor or list of token numbers, or a mapping
    with `input_ids`. With an attribute or method `lengths`, the tokens of every sample, none is read to measure it.
    Every rank needs the same samples. The number of samples may differ from epoch to epoch.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def sample_tokens(sample: Any, index: int) -> Ints:
    """The token numbers of a sample, int64[length].

    Args:
        sample: as a dataset returns it, see `MapDataset`.
        index: of the sample, for messages.

    Raises:
        ValueError: not a flat list of integers, or an empty one.
    """
    if isinstance(sample, Mapping):
        if "input_ids" not in sample:
            raise ValueError(f"sample {index} is a mapping of {', '.join(map(str, sample))}; it needs 'input_ids'")
        sample = sample["input_ids"]
    try:
        tokens = np.asarray(sample)
    except ValueError:  # parts of different lengths, such as (tokens, target)
        tokens = np.asarray(None)
    if not tokens.size:
        raise ValueError(f"sample {index} is empty; leave empty samples out of the dataset")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        kind = type(sample).__name__ if tokens.dtype == object else f"{tokens.dtype}{list(tokens.shape)}"
        raise ValueError(
            f"sample {index} is {kind}; expected its tokens alone, integers [length], or a mapping with input_ids"
        )
    return tokens.astype(np.int64)


def sample_lengths(dataset: MapDataset, batching: Batching) -> Any:
    """The length of every sample, before the cut: given, told by the dataset, kept on disk, or measured.

    Raises:
        ValueError: another number of lengths than of samples, or a sample that is no list of tokens.
    """
    lengths = batching.lengths if batching.lengths is not None else getattr(dataset, "lengths", None)
    if callable(lengths):
        lengths = lengths()
    if lengths is not None:
        if len(lengths) != len(dataset):
            raise ValueError(f"{len(lengths)} lengths for a dataset of {len(dataset)} samples; give one for each")
        return lengths
    if batching.length_cache is None:
        return measured_lengths(dataset)
    cache = LengthCache(
        batching.length_cache,
        samples=len(dataset),
        fingerprint=_fingerprint(dataset),
        measure_one=lambda index: len(sample_tokens(dataset[index], index)),
    )
    return cache.load_or_make(lambda: measured_lengths(dataset))


def measured_lengths(dataset: MapDataset) -> Ints:
    """The length of every sample, int64[samples], from the column that holds the tokens, or from reading each."""
    lengths = arrow_lengths(dataset)
    if lengths is not None:
        return lengths
    indices = tqdm(range(len(dataset)), "lengths", unit="sample", delay=PROGRESS_AFTER_S, disable=None, leave=False)
    return np.fromiter((len(sample_tokens(dataset[i], i)) for i in indices), np.int64)


def arrow_lengths(dataset: Any) -> Ints | None:
    """The length of every sample of a Hugging Face dataset, int64[samples], without reading a token: those of the lists
    in its Arrow column `input_ids`. None where samples are not the rows of that column, one for one.
    """
    if not _is_hugging_face(dataset) or dataset.format["type"] not in ROW_FORMATS:
        return None
    if "input_ids" not in dataset.column_names or not len(dataset):
        return None
    chunks = dataset.data.column("input_ids").chunks
    if not all(hasattr(chunk, "value_lengths") and not chunk.null_count for chunk in chunks):
        return None  # no lists; reading them says which sample is wrong
    lengths = np.concatenate([chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks])
    rows = dataset._indices  # what select, shuffle and the like leave in place of moving rows; None for all in order
    if rows is not None:
        lengths = lengths[rows.column(0).to_numpy()]
    # What the library keeps in private is checked against what it returns.
    told = len(lengths) == len(dataset) and lengths[0] == len(sample_tokens(dataset[0], 0))
    return lengths.astype(np.int64) if told else None


def _fingerprint(dataset: Any) -> str | None:
    """What a Hugging Face dataset calls its contents: another name for every way in which they were made."""
    found = getattr(dataset, "_fingerprint", None) if _is_hugging_face(dataset) else None
    return found if isinstance(found, str) else None


def _is_hugging_face(dataset: Any) -> bool:
    # Not of a class derived from it, which may return other samples than its rows.
    kind = type(dataset)
    return (kind.__module__, kind.__name__) == ("datasets.arrow_dataset", "Dataset")
