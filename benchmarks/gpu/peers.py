"""Who is compared: plans by dyncp's kernels, PyTorch's FlexAttention, and its `scaled_dot_product_attention`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.cases import Inputs, MaskMod
from dyncp.ir.plan import RankPlan
from dyncp.runtime.attention import attention

BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA math": SDPBackend.MATH,
}


VARIANTS = 256  # compiled versions of one function


class Contender(Protocol):
    """A way to compute attention. What it was made with says the mask and the heads."""

    @property
    def name(self) -> str: ...

    @property
    def is_peer(self) -> bool:
        """Whether it is what dyncp is compared with."""
        ...

    def arrange(self, tensor: Tensor) -> Tensor:
        """A tensor `[T, H, D]` in the layout that this takes and gives."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output, differentiable."""
        ...


@dataclass(frozen=True, slots=True)
class Ours:
    """The public call, of a plan with one rank."""

    name: str
    part: RankPlan
    kernels: str
    is_peer = False

    def arrange(self, tensor: Tensor) -> Tensor:
        return tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, self.part, kernels=self.kernels)


@dataclass(frozen=True, slots=True)
class Sdpa:
    """One backend of `scaled_dot_product_attention`, on views of the same memory."""

    name: str
    backend: SDPBackend
    causal: bool
    repeat: int = 1  # how often each KV head is repeated, for a backend that cannot share them
    is_peer = True

    def arrange(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1).unsqueeze(0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.repeat > 1:
            k, v = (tensor.repeat_interleave(self.repeat, 1) for tensor in (k, v))
        with sdpa_kernel(self.backend):
            return scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.repeat == 1)


def sdpa(name: str, causal: bool, inputs: Inputs) -> Sdpa:
    """A backend that takes heads as those of the inputs: shared KV heads if it can, else repeated ones."""
    peer = Sdpa(name, BACKENDS[name], causal)
    repeat = inputs.q.shape[1] // inputs.k.shape[1]
    if repeat == 1:
        return peer
    few = [peer.arrange(tensor[:128]) for tensor in inputs[:3]]
    for tried in (peer, Sdpa(f"{name}, repeated KV", BACKENDS[name], causal, repeat)):
        with contextlib.suppress(RuntimeError):
            tried.attend(*few)
            return tried
    return peer


class Flex:
    """FlexAttention, compiled on a GPU: its own kernels with their default configuration, for fixed sizes.

    Args:
        mod: the mask; None for all pairs.
        tokens: queries and keys.
        device: of the tensors.
    """

    name = "FlexAttention"
    is_peer = True

    def __init__(self, mod: MaskMod | None, tokens: int, device: torch.device) -> None:
        self.mod, self.tokens, self.device = mod, tokens, device
        self.flex: Callable[..., Tensor] = flex_attention
        self.make: Callable[..., BlockMask] = create_block_mask
        self.mask: BlockMask | None = None
        if device.type == "cuda":
            limits = torch._dynamo.config  # beyond them it would go on uncompiled, and write down all scores
            limits.recompile_limit = limits.accumulated_recompile_limit = VARIANTS
            limits.fail_on_recompile_limit_hit = True
            self.flex = torch.compile(flex_attention, dynamic=False)
            self.make = torch.compile(create_block_mask, dynamic=False)

    def build(self) -> None:
        """Make the block mask anew, as for a new batch."""
        if self.mod is None:
            return
        try:
            self.mask = self.make(self.mod, None, None, self.tokens, self.tokens, device=self.device)
        except RuntimeError:
            if self.make is create_block_mask:
                raise
            self.make, self.name = create_block_mask, "FlexAttention, eager mask"
            self.build()

    def arrange(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1).unsqueeze(0).contiguous()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.mask is None:
            self.build()
        return self.flex(q, k, v, block_mask=self.mask, enable_gqa=True)
