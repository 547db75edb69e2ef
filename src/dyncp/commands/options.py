"""Options that several subcommands share; each class turns itself into what the planner takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from dyncp import masks
from dyncp.batch_file import read_batch
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import PRESETS, Cluster
from dyncp.ir.shape import ITEMSIZE, AttentionShape


@dataclass(frozen=True)
class BatchOptions:
    """The batch: a file, or lengths and one mask for all of them."""

    files: Annotated[Positional[tuple[Path, ...]], arg(metavar="FILE")] = ()
    """Batch file (JSON, see docs/batch-files.md)."""
    lengths: Annotated[str | None, arg(metavar="N,N,...")] = None
    """Lengths of the sequences, separated by commas, instead of a file."""
    mask: Annotated[str | None, arg(metavar="KIND[:KEY=N,...]")] = None
    """Mask of every sequence given with --lengths, as `lambda:sink=64,window=1024`; causal when left out."""

    def batch(self) -> Batch:
        """The batch described.

        Raises:
            ValueError: neither or both of file and lengths, a mask for a file, or a bad one of them.
        """
        files = [str(file) for file in self.files]
        if self.lengths is None:
            if len(files) != 1:
                got = f"the batch files {', '.join(files)}" if files else "neither a batch file nor --lengths"
                raise ValueError(f"got {got}; give one batch file, or --lengths")
            if self.mask is not None:
                raise ValueError(
                    f"got both the batch file {files[0]!r} and --mask: a file has its own masks, and --mask is for "
                    "--lengths; drop one of the two"
                )
            return read_batch(files[0])
        if files:
            raise ValueError(
                f"got both a batch file and --lengths {self.lengths}: {files[0]!r} was taken as FILE; give one of the "
                "two, and separate lengths by commas without spaces, as in --lengths 4096,512"
            )
        spec = masks.parse_spec("causal" if self.mask is None else self.mask)
        lengths = [_integer(word) for word in self.lengths.split(",")]
        return Batch(tuple(Sequence(length, {"default": masks.from_spec(spec, length)}) for length in lengths))


@dataclass(frozen=True)
class ClusterOptions:
    """The ranks: a preset, or nodes and ranks per node."""

    cluster: Annotated[str, arg(metavar=f"{'|'.join(PRESETS)}[:NAME=N,...]")] = "p4de"
    """Kind of machine: its ranks per node, bandwidths and FLOP/s. Values of your own follow a colon, by the names that
    `dyncp.Cluster` has for them, as `p4de:inter_bytes_per_s=100e9,flow_bytes_per_s=12e9`."""
    nodes: int = 1
    """Number of machines."""
    ranks_per_node: Annotated[int | None, arg(metavar="INT")] = None
    """Ranks on each machine, where it is not what the preset has."""

    def build(self) -> Cluster:
        """The cluster described."""
        return Cluster.preset(self.cluster, self.nodes, self.ranks_per_node)

    @property
    def machine(self) -> str:
        """The preset's name alone."""
        return self.cluster.partition(":")[0]


@dataclass(frozen=True)
class ShapeOptions:
    """The attention layer."""

    q_heads: int = 8
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads; divides --q-heads."""
    head_dim: int = 128
    """Dimension of a query or key head."""
    v_head_dim: Annotated[int | None, arg(metavar="INT")] = None
    """Dimension of a value head, where it is another one."""
    dtype: Annotated[str, arg(metavar="|".join(ITEMSIZE))] = "bfloat16"
    """Data type of Q, K, V and O."""

    def build(self) -> AttentionShape:
        """The shape described."""
        return AttentionShape(self.q_heads, self.kv_heads, self.head_dim, self.v_head_dim, self.dtype)


def _integer(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{word!r} in --lengths is not a number; expected as in --lengths 4096,512") from None
