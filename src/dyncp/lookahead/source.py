"""The batches of a dataset, whatever its kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dyncp.lookahead.config import Batching
from dyncp.lookahead.draw import Draw, Source, global_batch
from dyncp.lookahead.indexed import IndexedSource
from dyncp.lookahead.lengths import MapDataset, sample_tokens
from dyncp.lookahead.sampler import GivenBatches, length_of
from dyncp.lookahead.stream import StreamSource

__all__ = ["Draw", "MapDataset", "Source", "global_batch", "is_stream", "make_source", "sample_tokens"]


def make_source(
    dataset: MapDataset | Iterable[Any], batching: Batching, batch_sampler: Iterable[Any] | None = None
) -> Source:
    """The source of a dataset's batches.

    Args:
        dataset: map-style, see `MapDataset`, or a stream of samples, see `is_stream`. Every rank needs the same samples
            in the same order: a stream must not be split over the ranks.
        batching: budget, cut, shuffle, masks and lengths.
        batch_sampler: for a map-style dataset, an iterable of lists of sample indices, the same on every rank, in place
            of `Batching.tokens` and the shuffle.

    Raises:
        ValueError: neither kind of dataset, nothing that says what is in a batch, a batch sampler for a stream, or
            lengths that do not fit the dataset.
    """
    given = None if batch_sampler is None else GivenBatches(batch_sampler)
    samples: Any = dataset
    if not is_stream(samples):
        return IndexedSource(samples, batching, given)
    if given:
        raise ValueError(
            "a batch_sampler chooses samples by index, but the dataset is a stream, whose samples have none: leave it "
            "out and give Batching(tokens=...)"
        )
    return StreamSource(samples, batching)


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be iterated.

    It is what derives from a class named `IterableDataset` (torch's inherits a `__getitem__` which only fails, and may
    have a `__len__`; Hugging Face's has neither), and what has `__iter__` but lacks `__getitem__` or a `__len__` that
    works.

    Raises:
        ValueError: neither a stream nor a map-style dataset.
    """
    if any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__):
        return True
    if isinstance(dataset, Mapping) and 0 not in dataset:
        raise ValueError(f"the dataset is a mapping of {', '.join(map(str, dataset)) or 'nothing'}; give one of these")
    if hasattr(dataset, "__getitem__") and length_of(dataset) is not None:
        return False
    if hasattr(dataset, "__iter__"):
        return True
    raise ValueError(f"the dataset is {dataset!r:.80}; it needs __len__ and __getitem__, or __iter__")
