"""The machines a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dyncp.ir.arguments import positive_number, whole_number

GB = 1e9
MAX_RANKS = 1 << 16


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` machines of `ranks_per_node` devices; ranks are numbered node by node.

    Args:
        nodes, ranks_per_node: at least 1 each.
        intra_bytes_per_s: bandwidth of one rank to the others of its node, one direction.
        inter_bytes_per_s: bandwidth of one node to the others, one direction, shared by its ranks.
        intra_latency_s, inter_latency_s: fixed cost of one message.
        flops_per_s: dense matrix FLOP/s that attention reaches on one rank.
    """

    nodes: int
    ranks_per_node: int
    intra_bytes_per_s: float = 300 * GB
    inter_bytes_per_s: float = 50 * GB
    intra_latency_s: float = 5e-6
    inter_latency_s: float = 15e-6
    flops_per_s: float = 180e12

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1, MAX_RANKS))
        for rate in ("intra_bytes_per_s", "inter_bytes_per_s", "flops_per_s"):
            positive_number(rate, getattr(self, rate), finite=False)
        for latency in ("intra_latency_s", "inter_latency_s"):
            if getattr(self, latency) != 0:
                positive_number(latency, getattr(self, latency))
        if self.ranks > MAX_RANKS:
            raise ValueError(f"{self.nodes} nodes of {self.ranks_per_node} ranks are more than {MAX_RANKS} ranks")

    @property
    def ranks(self) -> int:
        """Number of ranks over all nodes, `R`."""
        return self.nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """The node that a rank is on."""
        return rank // self.ranks_per_node

    @classmethod
    def preset(cls, name: str, nodes: int = 1, ranks_per_node: int | None = None) -> Cluster:
        """A cluster of a known kind of machine; see `PRESETS`.

        Raises:
            ValueError: an unknown preset.
        """
        if name not in PRESETS:
            raise ValueError(f"unknown cluster preset {name!r}; choose one of {', '.join(PRESETS)}")
        machine = PRESETS[name]
        per_node = machine.ranks_per_node if ranks_per_node is None else ranks_per_node
        return replace(machine, nodes=nodes, ranks_per_node=per_node)


# Bandwidths are the data sheets' (one direction); flops_per_s is about 60% of the data sheet's dense bf16 peak, which
# is what fused attention kernels reach.
PRESETS = {
    # 8 x A100-80G, NVSwitch 600 GB/s both ways, 4 x 100 Gb/s network
    "p4de": Cluster(1, 8, 300 * GB, 50 * GB, 5e-6, 15e-6, 180e12),
    # 8 x H100, NVSwitch 900 GB/s both ways, 32 x 100 Gb/s network
    "p5": Cluster(1, 8, 450 * GB, 400 * GB, 5e-6, 15e-6, 550e12),
    # 8 x H200, NVSwitch 900 GB/s both ways, 8 x 400 Gb/s network
    "dgx-h200": Cluster(1, 8, 450 * GB, 400 * GB, 5e-6, 10e-6, 550e12),
    # processes on one machine over the loopback interface
    "cpu": Cluster(1, 4, 2 * GB, 2 * GB, 50e-6, 50e-6, 40e9),
}
