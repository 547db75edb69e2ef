"""What is measured at which sizes: the whole benchmark, and a toy of it that exercises the same code without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from dyncp.ir.shape import AttentionShape

K = 1024


@dataclass(frozen=True, slots=True)
class RankCase:
    """A plan whose ranks all run on the one device: strategy, what the forward keeps, and dtype."""

    strategy: str
    keep: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of everything. Lists are in order of importance: what time does not suffice for is left out at their ends.

    Args:
        judged: whether targets of speed mean anything at these sizes.
        shape: of the attention layer, where nothing else is said.
        check_tokens, check_block: of the first checks, under all masks.
        small_dtypes, small_tokens, small_block: of checks in other dtypes; neither tokens nor blocks are whole tiles.
        heads, dims, heads_tokens: query and KV heads, and dims of keys and values, all of one with all of the other.
        rank_cases, rank_tokens, rank_block: of plans with all ranks on the device, two nodes of two ranks.
        dense_tokens: lengths of causal and full attention; from `judged_tokens` on they have targets.
        mask_tokens: lengths under masks.
        block_tokens: of one rank's blocks, where speed is measured.
        sweep_tokens, sweep_blocks: a length, and sizes of blocks for it.
        repeats, least: runs of everything that is timed, and how many there are even if they take long.
        case_s: how long is long, for one line of results.
        set_bytes: rotated input sets have at least so many bytes, so that no cache holds them.
        move_blocks, move_tokens: blocks that copies and reductions move at once, and tokens of each.
        replay_tokens, replay_ranks: of plans of which some ranks' programs run alone.
        table_sizes: of blocks, queries and keys alike.
        fill_tiles, fill_bytes: the least work of a launch that fills the chip.
        tiny_launches: launches with next to nothing to do, in a row, whose fixed cost is measured.
    """

    judged: bool
    shape: AttentionShape
    check_tokens: int
    check_block: int
    small_dtypes: tuple[str, ...]
    small_tokens: int
    small_block: int
    heads: tuple[tuple[int, int], ...]
    dims: tuple[tuple[int, int], ...]
    heads_tokens: int
    rank_cases: tuple[RankCase, ...]
    rank_tokens: int
    rank_block: int
    dense_tokens: tuple[int, ...]
    judged_tokens: int
    mask_tokens: tuple[int, ...]
    block_tokens: int
    sweep_tokens: int
    sweep_blocks: tuple[int, ...]
    repeats: int
    least: int
    case_s: float
    set_bytes: int
    move_blocks: int
    move_tokens: int
    replay_tokens: tuple[int, ...]
    replay_ranks: tuple[int, ...]
    table_sizes: tuple[int, ...]
    fill_tiles: int
    fill_bytes: int
    tiny_launches: int


FULL = Scale(
    judged=True,
    shape=AttentionShape(8, 2, 128),
    check_tokens=4000,
    check_block=512,
    small_dtypes=("float16", "float32"),
    small_tokens=1000,
    small_block=300,
    heads=((8, 2), (8, 8), (4, 1)),
    dims=((128, 128), (64, 64), (256, 256), (192, 128)),
    heads_tokens=2 * K,
    rank_cases=(
        RankCase("dynamic", "none", "bfloat16"),
        RankCase("dynamic", "all", "bfloat16"),
        RankCase("zigzag", "kv", "bfloat16"),
        RankCase("ulysses", "none", "bfloat16"),
        RankCase("dynamic", "none", "float32"),
    ),
    rank_tokens=8 * K,
    rank_block=512,
    dense_tokens=(16 * K, 64 * K, 32 * K, 8 * K, 4 * K, 2 * K),
    judged_tokens=16 * K,
    mask_tokens=(64 * K, 16 * K),
    block_tokens=2 * K,
    sweep_tokens=32 * K,
    sweep_blocks=(256, 512, 1024, 2048, 4096),
    repeats=15,
    least=5,
    case_s=3.0,
    set_bytes=256 << 20,
    move_blocks=64,
    move_tokens=2 * K,
    replay_tokens=(128 * K, 32 * K),
    replay_ranks=(8, 32),
    table_sizes=(64, 128, 256, 512, 1024, 2048, 4096),
    fill_tiles=16 * 132,
    fill_bytes=128 << 20,
    tiny_launches=50,
)

TOY = Scale(
    judged=False,
    shape=AttentionShape(4, 2, 16, dtype="float32"),  # bf16 arithmetic is wrong in Triton's interpreter
    check_tokens=70,
    check_block=40,
    small_dtypes=("float16",),
    small_tokens=50,
    small_block=30,
    heads=((2, 2), (2, 1)),
    dims=((16, 16), (48, 32)),
    heads_tokens=40,
    rank_cases=(RankCase("dynamic", "none", "float32"), RankCase("zigzag", "kv", "float16")),
    rank_tokens=96,
    rank_block=32,
    dense_tokens=(64,),
    judged_tokens=64,
    mask_tokens=(64,),
    block_tokens=32,
    sweep_tokens=64,
    sweep_blocks=(32, 64),
    repeats=1,
    least=1,
    case_s=1.0,
    set_bytes=0,
    move_blocks=2,
    move_tokens=16,
    replay_tokens=(64,),
    replay_ranks=(4,),
    table_sizes=(16, 32),
    fill_tiles=1,
    fill_bytes=0,
    tiny_launches=2,
)
