"""Sizes of tiles, warps and stages of Triton's kernels, by target and head dim."""

from __future__ import annotations

from dataclasses import dataclass

from dyncp.ir.shape import AttentionShape

INTERPRETER = 0  # in place of a compute capability


@dataclass(frozen=True, slots=True)
class Forward:
    """Of the forward: a program goes by `block_m` packed rows, and looks at `block_n` keys at a time."""

    block_m: int
    block_n: int
    warps: int
    stages: int

    def constants(self) -> dict[str, int]:
        """As the kernel takes them."""
        sizes = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n}
        return sizes | {"num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True, slots=True)
class Backward:
    """Of the backward: programs of keys go by `keys_n` keys and look at `keys_m` packed rows at a time, programs of
    queries by `queries_m` packed rows and `queries_n` keys."""

    keys_m: int
    keys_n: int
    queries_m: int
    queries_n: int
    warps: int
    stages: int

    def constants(self) -> dict[str, int]:
        """As the kernel takes them."""
        sizes = {"KEYS_M": self.keys_m, "KEYS_N": self.keys_n}
        sizes |= {"QUERIES_M": self.queries_m, "QUERIES_N": self.queries_n}
        return sizes | {"num_warps": self.warps, "num_stages": self.stages}


def forward_config(shape: AttentionShape, capability: int) -> Forward:
    """The forward of a shape on a target (80 for compute capability 8.0)."""
    if capability == INTERPRETER:
        return Forward(64, 32, 4, 1)
    return Forward(128, 64, 8, 3)


def backward_config(shape: AttentionShape, capability: int) -> Backward:
    """The backward of a shape on a target."""
    if capability == INTERPRETER:
        return Backward(32, 64, 64, 32, 4, 1)
    return Backward(64, 128, 128, 64, 8, 2)
