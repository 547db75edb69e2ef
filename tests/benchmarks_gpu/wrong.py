"""Kernels whose results are off by a little."""

from __future__ import annotations

from dyncp.runtime.kernels.reference import Reference


class Wrong(Reference):
    def attend_backward(self, buffers, instruction, score):
        super().attend_backward(buffers, instruction, score)
        for dkv_slot in instruction.writes[:, 1].tolist():
            buffers.fields(dkv_slot)[1].mul_(1.001)
