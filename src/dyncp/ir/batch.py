"""A batch as the planner sees it: lengths and masks, no tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dyncp.ir.mask import Mask

DEFAULT_MASK = "default"


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence: how long it is and what its tokens may see.

    Args:
        length: number of query tokens, at least 1.
        masks: one mask, or several by name for a model whose layers differ (every sequence of a batch then has the same
            names). Each mask is `length` queries by `kv_length` keys.
        kv_length: number of key tokens where they are not the queries' tokens (cross-attention); None for
            self-attention.

    Raises:
        ValueError: a length below 1, no mask, or a mask of another size.
    """

    length: int
    masks: Mapping[str, Mask]
    kv_length: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.masks, Mask):
            object.__setattr__(self, "masks", {DEFAULT_MASK: self.masks})
        if self.length < 1 or (self.kv_length is not None and self.kv_length < 1):
            raise ValueError(f"a sequence's length is {self.length} (keys {self.keys}); it must be at least 1")
        if not self.masks:
            raise ValueError("a sequence has no mask; give it at least one")
        for name, mask in self.masks.items():
            if (mask.q_length, mask.k_length) != (self.length, self.keys):
                raise ValueError(
                    f"mask {name!r} is {mask.q_length} queries by {mask.k_length} keys, but its sequence has "
                    f"{self.length} by {self.keys}: make the mask for the sequence's own length"
                )

    @property
    def keys(self) -> int:
        """Number of key tokens."""
        return self.length if self.kv_length is None else self.kv_length


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that are trained on together.

    Args:
        sequences: at least one.
        weights: how many layers use each mask name; 1 for a name left out.

    Raises:
        ValueError: no sequences, sequences with different mask names, an unknown name or a weight that is not positive.
    """

    sequences: tuple[Sequence, ...]
    weights: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sequences", tuple(self.sequences))
        if not self.sequences:
            raise ValueError("the batch has no sequences; give it at least one")
        names = tuple(self.sequences[0].masks)
        for index, sequence in enumerate(self.sequences):
            if set(sequence.masks) != set(names):
                raise ValueError(
                    f"sequence {index} has masks {', '.join(sequence.masks)} but sequence 0 has {', '.join(names)}: "
                    "give every sequence of a batch the same mask names"
                )
        weights = dict.fromkeys(names, 1.0) | dict(self.weights or {})
        for name, weight in weights.items():
            if name not in names:
                raise ValueError(f"weight for unknown mask {name!r}; the batch has {', '.join(names)}")
            if not weight > 0:
                raise ValueError(f"the weight of mask {name!r} is {weight}; it must be positive")
        object.__setattr__(self, "weights", weights)

    @property
    def mask_names(self) -> tuple[str, ...]:
        """Names of the masks, in the order of the first sequence."""
        return tuple(self.sequences[0].masks)

    @property
    def tokens(self) -> int:
        """Query tokens over all sequences."""
        return sum(sequence.length for sequence in self.sequences)
