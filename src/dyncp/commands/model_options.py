"""Options of whole models, for the commands that simulate."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated

from tyro.conf import arg

from dyncp.cost.layer import GEMM_EFFICIENCY, MODELS, PEAK_FLOPS_PER_S, Model
from dyncp.ir.shape import ITEMSIZE
from dyncp.simulator.iteration import OVERHEAD_S, RECOMPUTE, Training

Whole = Annotated[int | None, arg(metavar="INT")]


@dataclass(frozen=True)
class ModelOptions:
    """The model around attention; its heads, over --tp devices, are then the shape."""

    model: Annotated[str | None, arg(metavar="|".join(MODELS))] = None
    """A model to simulate whole iterations of; numbers that follow replace its own."""
    layers: Whole = None
    """Layers."""
    hidden: Whole = None
    """Width."""
    ffn: Whole = None
    """Width inside the MLP, which is gated."""
    vocabulary: Whole = None
    """Tokens of the vocabulary."""
    tp: int = 4
    """Devices of a tensor-parallel group; each group is one rank of the plan."""
    recompute: Annotated[str, arg(metavar="|".join(RECOMPUTE))] = "none"
    """Whether the backward runs the forward of every layer again."""
    gradient_dtype: Annotated[str, arg(metavar="|".join(ITEMSIZE))] = "bfloat16"
    """In which gradients are reduced over the ranks."""
    efficiency: float = GEMM_EFFICIENCY
    """Part of the data sheet's peak that matrix products reach."""
    overhead_s: float = OVERHEAD_S
    """Fixed seconds of every iteration; the default was fitted to 8b on 64 devices."""

    def build(self, preset: str) -> tuple[Model, Training]:
        """The model described, and how it is trained on the devices of a cluster preset.

        Raises:
            ValueError: an unknown model, or a number out of range.
        """
        if self.model is None or self.model not in MODELS:
            raise ValueError(f"unknown model {self.model!r}; choose one of {', '.join(MODELS)}")
        changed = {name: getattr(self, name) for name in ("layers", "hidden", "ffn", "vocabulary")}
        model = replace(MODELS[self.model], **{name: value for name, value in changed.items() if value is not None})
        training = Training(
            PEAK_FLOPS_PER_S[preset],
            self.tp,
            self.recompute,
            self.gradient_dtype,
            efficiency=self.efficiency,
            overhead_s=self.overhead_s,
        )
        return model, training

    def check_unused(self) -> None:
        """ValueError where something was given, but no model."""
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                raise ValueError(
                    f"got --{field.name.replace('_', '-')} without --model; it is for whole iterations: name one"
                )
