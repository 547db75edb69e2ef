"""Masks of packed blocks as FlexAttention takes them: a `BlockMask` of tiles, and a function for what is in them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import TokenBlocks
from dyncp.ir.plan import Comps
from dyncp.runtime.kernels.api import mask_patterns

EMPTY, PARTIAL, FULL = 0, 1, 2  # what a tile lets see: nothing, some of its pairs, all of them
STRIP_TILES = 32  # of rows that are classified at once, so that a long block takes little memory
FEWEST_TILES = 2  # of a packed tensor: a compiled function treats sizes of 1 as a case of its own


class Axis:
    """Blocks one behind the other, each padded to whole tiles, so that no tile has rows of two blocks.

    Args:
        tokens: int64[n], of each block.
        tile: rows of a tile.
    """

    def __init__(self, tokens: Ints, tile: int) -> None:
        self.tokens = tokens
        self.tiles = -(-tokens // tile)  # int64[n]
        self.first_tile = np.cumsum(self.tiles) - self.tiles  # int64[n]
        self.all_tiles = max(int(self.tiles.sum()), FEWEST_TILES)
        self.tile = tile

    @property
    def length(self) -> int:
        """Packed rows."""
        return self.all_tiles * self.tile

    @property
    def padding(self) -> Ints:
        """int64[n]: packed rows behind each block that hold nothing."""
        ends = np.append(self.first_tile[1:], self.all_tiles) * self.tile
        padding: Ints = ends - self.first_tile * self.tile - self.tokens
        return padding

    def positions(self) -> tuple[Ints, Ints]:
        """int32[length] each: the block of each packed row (n for those behind the last block's tiles), and the row in
        it."""
        tiles = np.append(self.tiles, self.all_tiles - self.tiles.sum())
        block = np.repeat(np.arange(len(tiles), dtype="int32"), tiles * self.tile)
        first = np.append(self.first_tile, self.tiles.sum()) * self.tile
        row: Ints = np.arange(self.length) - first[block]
        return block, row.astype("int32")


class MaskTables:
    """The masks of a rank's computation blocks on a device, from which `BlockMask`s of divisions are made.

    Args:
        comps: the computation blocks.
        tokens: the plan's token blocks.
        device: of the tables.
        tile: rows and keys of a tile.
    """

    def __init__(self, comps: Comps, tokens: TokenBlocks, device: torch.device, tile: int) -> None:
        of_comp, patterns = mask_patterns(comps, tokens)
        self.pattern = np.array(of_comp, "int64")  # int64[comps]
        self.kinds = [classify(rows, keys, tile) for rows, keys in patterns]
        self.device, self.tile = device, tile
        # Behind blank rows, for pairs of blocks that do not belong together: the rows of all patterns, in whole tiles.
        high = np.array([len(kinds) for kinds in self.kinds], "int64") * tile
        blank = max(int(high.max(initial=0)), FEWEST_TILES * tile)
        self.first_row = blank + np.cumsum(high) - high  # int64[patterns]
        tracks = max((rows.shape[1] for rows, _ in patterns), default=1)
        # One compiled function reads that many intervals per row: few different numbers, few functions.
        self.tracks = 1 << (tracks - 1).bit_length()
        intervals = np.zeros((blank + int(high.sum()), self.tracks, 2), "int32")
        for first, (rows, _) in zip(self.first_row.tolist(), patterns, strict=True):
            intervals[first : first + len(rows), : rows.shape[1]] = rows
        self.intervals = self._to_device(intervals.ravel())

    def block_mask(self, comp: Ints, query: Ints, key: Ints, queries: Axis, keys: Axis) -> BlockMask:
        """The mask between packed query blocks and packed key blocks.

        Args:
            comp: int64[n], computation blocks.
            query: int64[n], the query block of each.
            key: int64[n], the key block of each. No pair (query, key) comes twice.
            queries: how query blocks are packed.
            keys: how key blocks are packed.
        """
        pattern = self.pattern[comp]
        kinds = np.full((1, 1, queries.all_tiles, keys.all_tiles), EMPTY, "uint8")
        tops, lefts = queries.first_tile[query].tolist(), keys.first_tile[key].tolist()
        for top, left, number in zip(tops, lefts, pattern.tolist(), strict=True):
            piece = self.kinds[number]
            kinds[0, 0, top : top + len(piece), left : left + piece.shape[1]] = piece
        first_row = np.zeros((len(queries.tokens) + 1, len(keys.tokens) + 1), "int32")
        first_row[query, key] = self.first_row[pattern]
        lookup = [self._to_device(table) for table in (first_row, *queries.positions(), *keys.positions())]
        on_device = self._to_device(kinds)
        mask = BlockMask.from_kv_blocks(
            *_listed(on_device == PARTIAL),
            *_listed(on_device == FULL),
            BLOCK_SIZE=self.tile,
            mask_mod=visibility(self.tracks, self.intervals, *lookup),
            seq_lengths=(queries.length, keys.length),
        )
        let_vary(self.intervals, 0)
        for table in lookup:
            let_vary(table, *range(table.dim()))
        for counts in (mask.kv_num_blocks, mask.full_kv_num_blocks, mask.q_num_blocks, mask.full_q_num_blocks):
            let_vary(counts, 2)
        for indices in (mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices):
            let_vary(indices, 2, 3)
        return mask

    def _to_device(self, table: Ints) -> Tensor:
        return torch.from_numpy(table).to(self.device)


def classify(rows: Ints, keys: int, tile: int) -> Ints:
    """What each tile of a block lets see.

    Args:
        rows: int32[rows, R, 2], disjoint key intervals of each row.
        keys: of the block.
        tile: rows and keys of a tile.

    Returns:
        uint8[tiles of rows, tiles of keys], EMPTY, PARTIAL or FULL. A tile that reaches beyond the block's keys is
        never full, as a full tile is computed without asking the mask; one that reaches beyond its rows may be.
    """
    high, wide = -(-len(rows) // tile), -(-keys // tile)
    bounds = np.arange(wide + 1, dtype="int64") * tile
    seen = np.empty((high, wide), "int64")
    for top in range(0, high, STRIP_TILES):
        strip = rows[top * tile : (top + STRIP_TILES) * tile].astype("int64")
        before = np.zeros((len(strip), wide + 1), "int64")  # keys below each bound that a row sees
        for lo, hi in (part.T for part in strip.transpose(1, 0, 2)):
            before += np.clip(bounds, lo[:, None], np.maximum(lo, hi)[:, None]) - lo[:, None]
        per_row = np.diff(before, axis=1)
        seen[top : top + STRIP_TILES] = np.add.reduceat(per_row, np.arange(0, len(strip), tile), axis=0)
    tile_rows = np.minimum(len(rows) - np.arange(high) * tile, tile)
    kinds: Ints = np.where(seen == 0, EMPTY, np.where(seen == tile_rows[:, None] * tile, FULL, PARTIAL))
    return kinds.astype("uint8")


def visibility(
    tracks: int, intervals: Tensor, first_row: Tensor, q_block: Tensor, q_row: Tensor, k_block: Tensor, k_row: Tensor
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The `mask_mod` of a `BlockMask`: whether a packed query sees a packed key.

    Args:
        tracks: key intervals per row, R.
        intervals: int32[rows * R * 2], those of the rows of all patterns.
        first_row: int32[NQ + 1, NK + 1], where the pattern of a pair of blocks begins; 0, where blank rows begin, for
            pairs without.
        q_block: int32[S], the block of each packed query.
        q_row: int32[S], its row in the block.
        k_block: int32[S], the block of each packed key.
        k_row: int32[S], its place in the block.
    """

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        first = (first_row[q_block[query], k_block[key]] + q_row[query]) * (2 * tracks)
        place = k_row[key]
        seen = (place >= intervals[first]) & (place < intervals[first + 1])
        for track in range(1, tracks):
            bound = first + 2 * track
            seen = seen | ((place >= intervals[bound]) & (place < intervals[bound + 1]))
        return seen

    return mask_mod


def let_vary(tensor: Tensor | None, *dims: int) -> None:
    """Tell the compiler that sizes of a tensor have nothing to do with those of others, equal as they may be."""
    import torch._dynamo  # here, as it takes a second, which `import torch` leaves out for that reason

    if tensor is not None:
        torch._dynamo.maybe_mark_dynamic(tensor, list(dims))


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen tiles of each row of bool[1, 1, high, wide]: int32[1, 1, high], how many, and int32[1, 1, high, wide],
    which, those first."""
    order = torch.argsort(chosen.to(torch.uint8), dim=3, descending=True, stable=True)
    return chosen.sum(3, dtype=torch.int32), order.to(torch.int32)
