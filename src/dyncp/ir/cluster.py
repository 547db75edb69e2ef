"""The machines a plan is made for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from dyncp.ir.arguments import positive_number, whole_number

GB = 1e9
MAX_RANKS = 1 << 16
RATES = (
    "intra_bytes_per_s",
    "inter_bytes_per_s",
    "flops_per_s",
    "flow_bytes_per_s",
    "rank_bytes_per_s",
    "memory_bytes_per_s",
    "backward_rate",
    "cores",
)


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` machines of `ranks_per_node` devices; ranks are numbered node by node.

    Args:
        nodes, ranks_per_node: at least 1 each.
        intra_bytes_per_s: bandwidth of one rank to the others of its node, one direction.
        inter_bytes_per_s: bandwidth of one node to the others, one direction, shared by its ranks.
        intra_latency_s, inter_latency_s: fixed cost of one message.
        flops_per_s: dense matrix FLOP/s that attention reaches on one rank, forward.
        flow_bytes_per_s: the most that one message between nodes gets of that.
        rank_bytes_per_s: the most that one rank gets of that, one direction.
        memory_bytes_per_s: bandwidth of one rank's memory.
        backward_rate: what attention reaches in the backward, as a fraction of `flops_per_s`.
        launch_s, block_s: fixed cost of launching attention, and of each computation block in it.
        cores: how many ranks of the whole cluster compute at once at full speed; infinite where each has a device.
    """

    nodes: int
    ranks_per_node: int
    intra_bytes_per_s: float = 300 * GB
    inter_bytes_per_s: float = 50 * GB
    intra_latency_s: float = 5e-6
    inter_latency_s: float = 15e-6
    flops_per_s: float = 180e12
    flow_bytes_per_s: float = math.inf
    rank_bytes_per_s: float = math.inf
    memory_bytes_per_s: float = 2000 * GB
    backward_rate: float = 0.8
    launch_s: float = 20e-6
    block_s: float = 0.1e-6
    cores: float = math.inf

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1, MAX_RANKS))
        for rate in RATES:
            positive_number(rate, getattr(self, rate), finite=False)
        for latency in ("intra_latency_s", "inter_latency_s", "launch_s", "block_s"):
            if getattr(self, latency) != 0:
                positive_number(latency, getattr(self, latency))
        if self.ranks > MAX_RANKS:
            raise ValueError(f"{self.nodes} nodes of {self.ranks_per_node} ranks are more than {MAX_RANKS} ranks")

    @property
    def ranks(self) -> int:
        """Number of ranks over all nodes, `R`."""
        return self.nodes * self.ranks_per_node

    @property
    def message_bytes_per_s(self) -> float:
        """What one message between nodes reaches, alone."""
        return min(self.inter_bytes_per_s, self.rank_bytes_per_s, self.flow_bytes_per_s)

    @property
    def between_bytes_per_s(self) -> float:
        """What a node reaches to the others where each of its ranks has one message under way."""
        return min(self.inter_bytes_per_s, self.ranks_per_node * self.message_bytes_per_s)

    def node_of(self, rank: int) -> int:
        """The node that a rank is on."""
        return rank // self.ranks_per_node

    @classmethod
    def preset(cls, name: str, nodes: int = 1, ranks_per_node: int | None = None) -> Cluster:
        """A cluster of a known kind of machine; see `PRESETS`. Values of its own may follow the name, as
        `p4de:inter_bytes_per_s=100e9,flow_bytes_per_s=12e9`.

        Raises:
            ValueError: an unknown preset or value, or one that is not a number.
        """
        kind, _, words = name.partition(":")
        if kind not in PRESETS:
            raise ValueError(f"unknown cluster preset {kind!r}; choose one of {', '.join(PRESETS)}")
        machine = PRESETS[kind]
        per_node = machine.ranks_per_node if ranks_per_node is None else ranks_per_node
        values: dict[str, Any] = dict(_value(word) for word in words.split(",")) if words else {}
        return replace(machine, nodes=nodes, ranks_per_node=per_node, **values)


def _value(word: str) -> tuple[str, float]:
    """A value of a cluster by its name, as `launch_s=1e-5`."""
    name, _, number = word.partition("=")
    names = [name for name in Cluster.__dataclass_fields__ if name not in ("nodes", "ranks_per_node")]
    if name not in names:
        raise ValueError(f"unknown value {name!r} of a cluster; choose of {', '.join(names)}")
    try:
        return name, float(number)
    except ValueError:
        raise ValueError(f"{name} of a cluster is {number!r}; expected a number, as in {name}=25e9") from None


# Bandwidths between ranks, between nodes and of memory are the data sheets' (one direction). What is not on them:
# - flops_per_s, backward_rate: fused attention reaches about 58% of the A100's 312 TFLOP/s and 56% of the H100's and
#   H200's 989 TFLOP/s (dense bf16), and in the backward 0.8 of that;
# - flow_bytes_per_s: on p4de fitted to the hops of published ring baselines (`dyncp reproduce fit`), 77% of a rank's
#   share of its node's network; taken over for the other two, which have not been fitted;
# - rank_bytes_per_s: a rank's network card (two share one on p4de), on p5 its four;
# - launch_s, block_s: round numbers for how long a device is not busy around a kernel, and for another block in a
#   kernel's tables. Those of the published implementations are larger: see `reproduce/constants.py`.
PRESETS = {
    # 8 x A100-80G (2.0 TB/s HBM2e), NVSwitch 300 GB/s, 4 x 100 Gb/s network
    "p4de": Cluster(1, 8, 300 * GB, 50 * GB, 5e-6, 15e-6, 180e12, 4.8 * GB, 12.5 * GB, 2000 * GB, 0.8, 20e-6, 0.1e-6),
    # 8 x H100 SXM (3.35 TB/s HBM3), NVSwitch 450 GB/s, 32 x 100 Gb/s EFA
    "p5": Cluster(1, 8, 450 * GB, 400 * GB, 5e-6, 15e-6, 550e12, 38 * GB, 50 * GB, 3350 * GB, 0.8, 20e-6, 0.1e-6),
    # 8 x H200 SXM (4.8 TB/s HBM3e), NVSwitch 450 GB/s, 8 x 400 Gb/s InfiniBand
    "dgx-h200": Cluster(1, 8, 450 * GB, 400 * GB, 5e-6, 10e-6, 550e12, 38 * GB, 50 * GB, 4800 * GB, 0.8, 20e-6, 0.1e-6),
    # processes on one machine over the loopback interface
    "cpu": Cluster(1, 4, 2 * GB, 2 * GB, 50e-6, 50e-6, 40e9),
}
