"""A batch as the planner sees it: lengths and masks, no tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dyncp.ir.arguments import plain_name, positive_number, whole_number
from dyncp.ir.mask import Mask

DEFAULT_MASK = "default"
MAX_WEIGHT = 1e9


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence: how long it is and what its tokens may see.

    Args:
        length: number of query tokens, at least 1.
        masks: one `Mask`, or for a model whose layers differ a mapping of several by name (every sequence of a batch
            then has the same names). The field is always a mapping: a single mask is named "default" in it. Each mask
            is `length` queries by `kv_length` keys.
        kv_length: number of key tokens where they are not the queries' tokens (cross-attention); None for
            self-attention.

    Raises:
        ValueError: a length below 1, no mask, or a mask of another size.
    """

    length: int
    masks: Mapping[str, Mask]
    kv_length: int | None = None

    if TYPE_CHECKING:  # what may be given; the fields say what is kept

        def __init__(self, length: int, masks: Mask | Mapping[str, Mask], kv_length: int | None = None) -> None: ...

    def __post_init__(self) -> None:
        if isinstance(self.masks, Mask):
            object.__setattr__(self, "masks", {DEFAULT_MASK: self.masks})
        object.__setattr__(self, "length", whole_number("a sequence's length", self.length, 1))
        if self.kv_length is not None:
            object.__setattr__(self, "kv_length", whole_number("a sequence's kv_length", self.kv_length, 1))
        if not isinstance(self.masks, Mapping) or not self.masks:
            raise ValueError(f"a sequence's masks are {self.masks!r}; give it a Mask, or at least one by name")
        for name, mask in self.masks.items():
            plain_name("a mask's name", name)
            if not isinstance(mask, Mask):
                raise ValueError(f"mask {name!r} is {mask!r}; expected a Mask, as the constructors in dyncp.masks make")
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
        sequences: at least one, as a list, a tuple or any other iterable; the field is a tuple.
        weights: how many layers use each mask name; 1 for a name left out. The field has every name.

    Raises:
        ValueError: no sequences, sequences with different mask names, an unknown name or a weight that is not positive.
    """

    sequences: tuple[Sequence, ...]
    weights: Mapping[str, float] | None = None

    if TYPE_CHECKING:

        def __init__(self, sequences: Iterable[Sequence], weights: Mapping[str, float] | None = None) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "sequences", tuple(self.sequences))
        if not self.sequences:
            raise ValueError("the batch has no sequences; give it at least one")
        for index, sequence in enumerate(self.sequences):
            if not isinstance(sequence, Sequence):
                raise ValueError(f"sequence {index} of the batch is {sequence!r}; expected a dyncp.Sequence")
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
            if positive_number(f"the weight of mask {name!r}", weight) > MAX_WEIGHT:
                raise ValueError(f"the weight of mask {name!r} is {weight}; expected a number of layers, at most 1e9")
        object.__setattr__(self, "weights", weights)

    @property
    def mask_names(self) -> tuple[str, ...]:
        """Names of the masks, in the order of the first sequence."""
        return tuple(self.sequences[0].masks)

    @property
    def tokens(self) -> int:
        """Query tokens over all sequences."""
        return sum(sequence.length for sequence in self.sequences)
