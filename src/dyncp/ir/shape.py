"""The shape of one attention layer: heads, head dimensions and the dtype of its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from dyncp.ir.arguments import whole_number

MAX_HEADS = 1 << 20  # and dimensions of a head
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and dimensions of one attention layer.

    A *head group* is one KV head with the query heads that share it (grouped-query attention); it is the
    smallest unit of heads that is placed (paper, section 4.1).

    Args:
        q_heads, kv_heads: number of query and of key/value heads; `kv_heads` divides `q_heads`.
        head_dim: dimension of a query and key head; even.
        v_head_dim: dimension of a value head; `head_dim` when left out.
        dtype: dtype of Q, K, V and O: `float32`, `bfloat16` or `float16`.

    Raises:
        ValueError: a number that is not positive, heads that do not divide, an odd dimension or an unknown dtype.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        for name in ("q_heads", "kv_heads", "head_dim", "v_head_dim"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1, MAX_HEADS))
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"{self.q_heads} query heads cannot be shared by {self.kv_heads} KV heads: "
                "choose a number of KV heads that divides the number of query heads"
            )
        for name in ("head_dim", "v_head_dim"):
            if getattr(self, name) % 2:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be even")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"unknown dtype {self.dtype!r}; choose one of {', '.join(ITEMSIZE)}")

    @property
    def groups(self) -> int:
        """Number of head groups, `G`."""
        return self.kv_heads

    @property
    def group_heads(self) -> int:
        """Query heads in one head group."""
        return self.q_heads // self.kv_heads

    @property
    def value_dim(self) -> int:
        """`v_head_dim`, never None."""
        assert self.v_head_dim is not None
        return self.v_head_dim
