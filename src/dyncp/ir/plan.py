"""The plan: what every rank does, as lists of five instructions over numbered slots (paper, section 5).

Reading order of this file: what data there is (`Kind`, `FIELDS`), which of it a pass reads, writes and moves (`Pass`),
where it lies (`Slots`), the five instructions, and the plan made of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints, freeze_fields
from dyncp.ir.blocks import HAS_Q, TokenBlocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.mask import Mask
from dyncp.ir.schedule import Side
from dyncp.ir.shape import ITEMSIZE, AttentionShape

PLAN_VERSION = 1


class PlanError(ValueError):
    """A plan that would compute something else than the batch's attention, or not end; see `check.check_plan`."""


class Kind(IntEnum):
    """Data of one (token block, head group)."""

    Q = 0
    KV = 1
    OUT = 2  # output and its log-sum-exp
    DO = 3  # gradient of the output
    STATS = 4  # log-sum-exp and delta = sum(dO * O), of the finished output
    DQ = 5
    DKV = 6

    @property
    def of_keys(self) -> bool:
        """Whether the data belongs to a block's keys rather than to its queries."""
        return self in (Kind.KV, Kind.DKV)

    @property
    def is_partial(self) -> bool:
        """Whether the data is a result that several ranks add to: accumulated in fp32, sent in the wire dtype."""
        return self in (Kind.OUT, Kind.DQ, Kind.DKV)


class Field(NamedTuple):
    """One tensor of a kind, `[tokens, heads, dim]`; `heads` is 1 for keys and the head group's query heads else."""

    name: str
    dim: str  # "qk", "v" or "one"
    dtype: str  # "model", "partial" (fp32 or the wire dtype, by slot) or "float32"


FIELDS: dict[Kind, tuple[Field, ...]] = {
    Kind.Q: (Field("q", "qk", "model"),),
    Kind.KV: (Field("k", "qk", "model"), Field("v", "v", "model")),
    Kind.OUT: (Field("o", "v", "partial"), Field("lse", "one", "float32")),
    Kind.DO: (Field("do", "v", "model"),),
    Kind.STATS: (Field("lse", "one", "float32"), Field("delta", "one", "float32")),
    Kind.DQ: (Field("dq", "qk", "partial"),),
    Kind.DKV: (Field("dk", "qk", "partial"), Field("dv", "v", "partial")),
}


@dataclass(frozen=True, slots=True)
class Pass:
    """The one table that tells forward from backward: what a computation block reads and adds to, and what a transfer
    of each side carries. Everything else about the two passes is the same code.
    """

    name: str
    reads: tuple[Kind, ...]
    writes: tuple[Kind, ...]
    moves: dict[Side, tuple[Kind, ...]]


FORWARD = Pass(
    "forward",
    reads=(Kind.Q, Kind.KV),
    writes=(Kind.OUT,),
    moves={Side.Q_IN: (Kind.Q,), Side.KV_IN: (Kind.KV,), Side.Q_OUT: (Kind.OUT,), Side.KV_OUT: ()},
)
BACKWARD = Pass(
    "backward",
    reads=(Kind.Q, Kind.DO, Kind.STATS, Kind.KV),
    writes=(Kind.DQ, Kind.DKV),
    moves={
        Side.Q_IN: (Kind.Q, Kind.DO, Kind.STATS),
        Side.KV_IN: (Kind.KV,),
        Side.Q_OUT: (Kind.DQ,),
        Side.KV_OUT: (Kind.DKV,),
    },
)
PASSES = (FORWARD, BACKWARD)

# What remote data the forward keeps for the backward, so that it is not sent again.
KEEP: dict[str, tuple[Kind, ...]] = {"none": (), "kv": (Kind.KV,), "all": (Kind.Q, Kind.KV)}
WIRE = ("model", "float32")  # dtype of partial results on the wire


def field_layout(shape: AttentionShape, kind: Kind, partial: str) -> list[tuple[int, int, str]]:
    """(heads, dim, dtype) of each field of a kind, in the order they lie in a slot; `partial`, one of WIRE, is the
    dtype that partial results have there.
    """
    dims = {"qk": shape.head_dim, "v": shape.value_dim, "one": 1}
    dtypes = {
        "model": shape.dtype,
        "partial": shape.dtype if partial == "model" else "float32",
        "float32": "float32",
    }
    heads = 1 if kind.of_keys else shape.group_heads
    return [(heads, dims[field.dim], dtypes[field.dtype]) for field in FIELDS[kind]]


def token_bytes(shape: AttentionShape, kind: Kind, partial: str) -> int:
    """Bytes of one token of one head group; `partial` as in `field_layout`."""
    return sum(heads * dim * ITEMSIZE[dtype] for heads, dim, dtype in field_layout(shape, kind, partial))


def moved(pass_: Pass, side: Side, keep: str) -> tuple[Kind, ...]:
    """What a transfer of a side carries in a pass: `Pass.moves` without what the forward kept."""
    kept = KEEP[keep] if pass_ is BACKWARD else ()
    return tuple(kind for kind in pass_.moves[side] if kind not in kept)


def side_token_bytes(shape: AttentionShape, pass_: Pass, keep: str, wire: str) -> list[int]:
    """Bytes per token of one head group that a transfer of each `Side` carries in a pass."""
    return [sum(token_bytes(shape, kind, wire) for kind in moved(pass_, side, keep)) for side in Side]


def both_passes_bytes(shape: AttentionShape, keep: str, wire: str) -> Ints:
    """int64[sides]: the same in forward and backward together."""
    total: Ints = np.sum([side_token_bytes(shape, pass_, keep, wire) for pass_ in PASSES], axis=0)
    return total


class Place(IntEnum):
    """Where a slot lies."""

    LOCAL = 0  # in the caller's tensors; the offset is a row (a local token)
    ARENA = 1  # in the pass's scratch memory; the offset is in bytes
    KEPT = 2  # in memory that lives from the forward to the backward; the offset is in bytes


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """The places that the instructions of one program name by number. A slot holds one kind of one (block, group),
    its fields one behind the other. Slots may share memory when their lives do not overlap.
    """

    kind: Ints  # uint8[S], Kind
    block: Ints  # int32[S]
    group: Ints  # int32[S]
    place: Ints  # uint8[S], Place
    wire: Ints  # uint8[S], 1 where a partial result lies in the wire dtype, not in fp32
    offset: Ints  # int64[S], rows (LOCAL) or bytes

    def __post_init__(self) -> None:
        freeze_fields(self, kind="uint8", block="int32", group="int32", place="uint8", wire="uint8", offset="int64")

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Blockwise attention: run computation block `comp[i]` on the slots `reads[i]`, add to the slots `writes[i]`, in
    order. The slots in `fresh` are set to nothing (zeros; log-sum-exp minus infinity) before.
    """

    comp: Ints  # int32[n], row of the rank's Comps
    reads: Ints  # int32[n, len(Pass.reads)], slots
    writes: Ints  # int32[n, len(Pass.writes)], slots
    fresh: Ints  # int32[m], slots

    def __post_init__(self) -> None:
        freeze_fields(self, comp="int32", reads="int32", writes="int32", fresh="int32")


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """Blockwise reduction: merge partial results (OUT by log-sum-exp, gradients by sum), `dst[i] += src[i]`, in order.
    The slots in `fresh` are set to nothing before.
    """

    src: Ints  # int32[n], slots
    dst: Ints  # int32[n], slots
    fresh: Ints  # int32[m], slots

    def __post_init__(self) -> None:
        freeze_fields(self, src="int32", dst="int32", fresh="int32")


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Blockwise copy, `dst[i] = src[i]`, casting partial results to the destination's dtype."""

    src: Ints  # int32[n], slots
    dst: Ints  # int32[n], slots

    def __post_init__(self) -> None:
        freeze_fields(self, src="int32", dst="int32")


@dataclass(frozen=True, slots=True, eq=False)
class CommLaunch:
    """Start the transfers of one step: at most one message to, and one from, each peer. Message i is the run of slots
    `slots[ptr[i]:ptr[i + 1]]`, which lie one behind the other in memory, so it is sent or received without a copy.
    """

    step: int
    peer: Ints  # int32[m], rank
    send: Ints  # uint8[m], 1 for a send, 0 for a receive
    ptr: Ints  # int32[m + 1]
    slots: Ints  # int32[k]

    def __post_init__(self) -> None:
        freeze_fields(self, peer="int32", send="uint8", ptr="int32", slots="int32")


@dataclass(frozen=True, slots=True, eq=False)
class CommWait:
    """Wait until all transfers of one step have ended, both ways."""

    step: int


Instruction = Attention | Reduction | Copy | CommLaunch | CommWait


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One pass of one rank under one mask."""

    slots: Slots
    instructions: tuple[Instruction, ...]
    arena_bytes: int
    kept_bytes: int  # the same in the forward and the backward program


@dataclass(frozen=True, slots=True, eq=False)
class Comps:
    """The computation blocks of one rank under one mask (whatever the head group) and the part of the mask in each."""

    index: Ints  # int32[n], row of Blocks, to tell blocks apart over ranks
    q_block: Ints  # int32[n]
    kv_block: Ints  # int32[n]
    slice_ptr: Ints  # int32[n + 1]
    slices: Ints  # int32[K, 6], as Mask.slices, rows and keys counted from the blocks' starts

    def __post_init__(self) -> None:
        freeze_fields(self, index="int32", q_block="int32", kv_block="int32", slice_ptr="int32", slices="int32")

    def __len__(self) -> int:
        return len(self.index)

    def mask(self, comp: int, tokens: TokenBlocks) -> Mask:
        """The mask inside one computation block."""
        sizes = tokens.tokens
        rows = self.slices[self.slice_ptr[comp] : self.slice_ptr[comp + 1]]
        return Mask(int(sizes[self.q_block[comp]]), int(sizes[self.kv_block[comp]]), rows)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RankProgram:
    """What one rank does under one mask. Can be referred to weakly, so that what is derived from it can go with it."""

    comps: Comps
    forward: Program
    backward: Program


@dataclass(frozen=True, slots=True, eq=False)
class PlanHeader:
    """What all ranks of a plan share."""

    strategy: str
    shape: AttentionShape
    nodes: int
    ranks_per_node: int
    keep: str  # a key of KEEP
    wire: str  # one of WIRE
    mask_names: tuple[str, ...]
    mask_weights: tuple[float, ...]
    tokens: TokenBlocks
    owner: Ints  # int32[B], the rank of each token block

    def __post_init__(self) -> None:
        freeze_fields(self, owner="int32")
        if self.keep not in KEEP:
            raise ValueError(f"unknown keep {self.keep!r}; choose one of {', '.join(KEEP)}")
        if self.wire not in WIRE:
            raise ValueError(f"unknown wire dtype {self.wire!r}; choose one of {', '.join(WIRE)}")

    @property
    def ranks(self) -> int:
        """Number of ranks, `R`."""
        return self.nodes * self.ranks_per_node

    @property
    def cluster(self) -> Cluster:
        """The layout of the ranks (bandwidths at their defaults)."""
        return Cluster(self.nodes, self.ranks_per_node)

    def owned(self, rank: int, role: int = HAS_Q) -> Ints:
        """int64[b]: the token blocks of a rank with that role, in the order their tokens have in its tensors."""
        return np.flatnonzero((self.owner == rank) & ((self.tokens.role & role) > 0))

    def local_tokens(self, rank: int, role: int = HAS_Q) -> tuple[Ints, Ints]:
        """(int32[T] sequence, int64[T] position in it) of the tokens of a rank's tensors, in order: queries with
        `HAS_Q`, keys with `HAS_KV` (the same tokens in self-attention).
        """
        blocks = self.owned(rank, role)
        sizes = self.tokens.tokens[blocks]
        sequence = np.repeat(self.tokens.sequence[blocks], sizes)
        position = [np.arange(self.tokens.start[b], self.tokens.stop[b]) for b in blocks]
        return sequence, np.concatenate(position) if position else np.empty(0, "int64")

    def local_rows(self, role: int = HAS_Q) -> Ints:
        """int64[B]: the first row of each token block in its owner's tensors (-1 without that role)."""
        rows = np.full(len(self.tokens), -1, "int64")
        for rank in range(self.ranks):
            blocks = self.owned(rank, role)
            sizes = self.tokens.tokens[blocks]
            rows[blocks] = np.cumsum(sizes) - sizes
        return rows

    def field_layout(self, kind: Kind, wire: bool) -> list[tuple[int, int, str]]:
        """`field_layout` of a slot of this plan; `wire` as in Slots."""
        return field_layout(self.shape, kind, self.wire if wire else "float32")

    def piece_bytes(self, kind: Kind, wire: bool) -> Ints:
        """int64[B]: bytes of a slot of that kind for each token block; `wire` as in Slots."""
        return self.tokens.tokens * token_bytes(self.shape, kind, self.wire if wire else "float32")


@dataclass(frozen=True, slots=True, eq=False)
class RankPlan:
    """All that one rank needs to run its part of a plan."""

    header: PlanHeader
    rank: int
    programs: tuple[RankProgram, ...]  # one per mask name
    digest: str  # of the whole plan

    def program(self, mask: str) -> RankProgram:
        """The program for a mask name.

        Raises:
            ValueError: a name that the plan was not made for.
        """
        if mask not in self.header.mask_names:
            raise ValueError(f"no mask {mask!r} in this plan; it has {', '.join(self.header.mask_names)}")
        return self.programs[self.header.mask_names.index(mask)]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A parallel attention, forward and backward, of one batch on all ranks. Equality is equality of digests."""

    header: PlanHeader
    programs: tuple[tuple[RankProgram, ...], ...]  # per rank, one per mask name
    digest: str  # see codec.digest

    def rank(self, rank: int) -> RankPlan:
        """One rank's part.

        Raises:
            ValueError: a rank that the plan does not have.
        """
        if not 0 <= rank < self.header.ranks:
            raise ValueError(f"rank {rank} is not in this plan, which has {self.header.ranks} ranks")
        return RankPlan(self.header, rank, self.programs[rank], self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)
