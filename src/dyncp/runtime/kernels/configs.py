"""Sizes of tiles, warps and stages of Triton's kernels, by target and head dims.

Chosen by what the compiler reports, which `benchmarks/gpu/compiled.py` shows: no more shared memory than a target has,
few registers spilled, and tiles as large as that allows. Loading ahead takes two stages for a tile, because where it is
must have been loaded before: with three stages tiles are loaded one ahead and their places two, with five two and four.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from dyncp.ir.shape import AttentionShape

C = TypeVar("C")
INTERPRETER = 0  # in place of a compute capability
SMALLEST = 89  # a compute capability with little shared memory


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


# target -> the larger head dim, up to which -> sizes
FORWARD: dict[str, dict[int, Forward]] = {
    "interpreter": {256: Forward(64, 32, 4, 1)},
    "small": {
        64: Forward(128, 64, 8, 3),
        128: Forward(64, 64, 4, 3),
        192: Forward(64, 32, 4, 3),
        256: Forward(64, 32, 8, 1),
    },
    "ampere": {192: Forward(128, 64, 8, 3), 256: Forward(64, 64, 8, 3)},
    "hopper": {64: Forward(128, 128, 8, 5), 128: Forward(128, 64, 8, 5), 256: Forward(128, 64, 8, 3)},
    "blackwell": {128: Forward(128, 128, 8, 3), 256: Forward(128, 64, 8, 3)},
    "fp32": {64: Forward(64, 32, 4, 2), 128: Forward(32, 32, 4, 2), 256: Forward(16, 16, 4, 1)},
}
BACKWARD: dict[str, dict[int, Backward]] = {
    "interpreter": {256: Backward(32, 64, 64, 32, 4, 1)},
    "small": {
        64: Backward(64, 64, 64, 64, 8, 3),
        128: Backward(32, 64, 64, 32, 8, 3),
        256: Backward(32, 32, 32, 32, 4, 1),
    },
    "ampere": {
        64: Backward(64, 128, 128, 64, 8, 3),
        128: Backward(64, 64, 64, 64, 8, 3),
        256: Backward(32, 64, 64, 32, 8, 3),
    },
    "hopper": {
        128: Backward(64, 128, 128, 64, 8, 3),
        192: Backward(64, 64, 64, 64, 8, 3),
        256: Backward(64, 64, 64, 64, 8, 2),
    },
    "blackwell": {  # more stages take half a minute to compile
        128: Backward(64, 128, 128, 64, 8, 2),
        192: Backward(64, 64, 64, 64, 8, 2),
        256: Backward(32, 64, 64, 32, 8, 2),
    },
    "fp32": {64: Backward(32, 32, 32, 32, 4, 1), 256: Backward(16, 16, 16, 16, 4, 1)},
}


# where the query heads of a head group are no power of two, and finding packed rows takes more registers; up to dim 128
ODD_HEADS = {"hopper": Backward(64, 64, 64, 64, 8, 3), "blackwell": Backward(64, 64, 64, 64, 8, 2)}


def target_of(shape: AttentionShape, capability: int) -> str:
    """The row of the tables for a compute capability (80 for 8.0). `small` are those with 100 KB of shared memory."""
    if capability == INTERPRETER:
        return "interpreter"
    if shape.dtype == "float32":
        return "fp32"
    if 80 <= capability < 90:
        return "ampere" if capability in (80, 87) else "small"
    if 90 <= capability < 120:
        return "hopper" if capability < 100 else "blackwell"
    return "small"


class Tiles(NamedTuple):
    """Of both passes."""

    forward: Forward
    backward: Backward


def tiles_of(shape: AttentionShape, capability: int) -> Tiles:
    """Those chosen for a shape on a target."""
    target = target_of(shape, capability)
    backward = _smallest(BACKWARD[target], shape)
    if shape.group_heads & (shape.group_heads - 1) and max(shape.head_dim, shape.value_dim) <= 128:
        backward = ODD_HEADS.get(target, backward)
    return Tiles(_smallest(FORWARD[target], shape), backward)


def _smallest(configs: dict[int, C], shape: AttentionShape) -> C:
    # Values are taken as a whole, in a power of two; keys in two parts.
    dim = max(shape.head_dim, 1 << (shape.value_dim - 1).bit_length())
    return next(config for most, config in configs.items() if dim <= most)
