"""A small byte-level GPT: RoPE, grouped-query attention, pre-norm. It does not know how its attention is computed.

Legend: T tokens, W width, H query heads, G key/value heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

# (q_THD, k_TGD, v_TGD) -> out_THD, over whatever tokens this process holds
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of the model; the defaults make about 590,000 parameters."""

    vocabulary: int = 256
    layers: int = 2
    q_heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    mlp_ratio: int = 2

    @property
    def width(self) -> int:
        """Width of the residual stream, W."""
        return self.q_heads * self.head_dim


class Rotary(nn.Module):
    """Rotary position embedding of the positions within each sequence, wherever its tokens are."""

    frequency: Tensor  # float32[D / 2]

    def __init__(self, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self.register_buffer("frequency", frequency, persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, [T, 1, D / 2] each."""
        angle = position_ids[:, None, None] * self.frequency
        return angle.cos(), angle.sin()


def rotate(x_THD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the two halves of every head as pairs of coordinates."""
    cos, sin = rotary
    first, second = x_THD.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Block(nn.Module):
    """One layer: attention and MLP, each after a norm and around a residual."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        width, kv_width = size.width, size.kv_heads * size.head_dim
        self.head_dim = size.head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_width, bias=False)
        self.v = nn.Linear(width, kv_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, size.mlp_ratio * width, bias=False)
        self.down = nn.Linear(size.mlp_ratio * width, width, bias=False)

    def forward(self, x_TW: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[T, W] to [T, W]."""
        normed = self.attention_norm(x_TW)
        q_THD, k_TGD, v_TGD = (
            project(normed).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v)
        )
        attended = attend(rotate(q_THD, rotary), rotate(k_TGD, rotary), v_TGD)
        x_TW = x_TW + self.out(attended.flatten(1))
        return x_TW + self.down(gelu(self.up(self.mlp_norm(x_TW))))


class GPT(nn.Module):
    """The model; the same seed gives the same weights."""

    def __init__(self, size: ModelSize, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.rotary = Rotary(size.head_dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=_first_std(name, parameter, size), generator=generator)

    def forward(self, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """Logits.

        Args:
            input_ids: int64[T].
            position_ids: int64[T], position of each token within its sequence.
            attend: attention over these tokens.

        Returns:
            float32[T, V].
        """
        x_TW = self.embedding(input_ids)
        rotary = self.rotary(position_ids)
        for block in self.blocks:
            x_TW = block(x_TW, rotary, attend)
        logits: Tensor = self.head(self.norm(x_TW))
        return logits


def _first_std(name: str, weight: Tensor, size: ModelSize) -> float:
    if name.startswith("embedding"):
        return 0.5
    if name.startswith("head"):
        return 0.02  # about equal odds for all bytes
    # Outputs into the residual stream start smaller, so that its variance does not grow with depth.
    into_stream = name.endswith(("out.weight", "down.weight"))
    return float((weight.shape[1] * (2 * size.layers if into_stream else 1)) ** -0.5)
