"""The constants of the figures: two named sets, and the clusters that follow from them.

`hardware` is the presets of `ir/cluster.py`: link rates, what attention reaches, and modest fixed costs. `published`
adds what the published implementations take for a launch and for each sequence in it; it is for their bars. Comparisons
of our own are made under both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from dyncp.ir.cluster import Cluster


class Overheads(NamedTuple):
    """Fixed costs of a kernel: of a launch, and of each pair of a run of queries and a run of keys in it."""

    launch_s: float
    block_s: float


@dataclass(frozen=True, slots=True)
class Costs:
    """A set of constants: overheads by kernel, where they are not the cluster's.

    Three kernels are told apart: `library`, the fused kernels for causal masks that the baselines call; `extended`,
    what the baselines call under sparse masks; and `blockwise`, which plans of blocks run on.
    """

    name: str
    overheads: Mapping[str, Overheads]

    def cluster(self, cluster: Cluster, kernel: str, split: int = 1) -> Cluster:
        """A cluster with the fixed costs of this set.

        Args:
            cluster: the devices and links.
            kernel: `library`, `extended` or `blockwise`.
            split: how many computation blocks of a plan stand for one pair of runs: ranks that exchange heads own a
                part of each run, so their plans have more blocks than the kernel has pairs. 0 for kernels without
                lengths, which take a padded batch in one piece.
        """
        if kernel not in self.overheads:
            return cluster
        launch_s, block_s = self.overheads[kernel]
        return replace(cluster, launch_s=launch_s, block_s=block_s / split if split else 0.0)


# Fitted, with p4de's flow_bytes_per_s, flops_per_s and backward_rate, to the bars of the published baselines: `fit`. A
# pair of runs is work of the host (lengths, indices, merging by sequence). A blockwise kernel reads its blocks from a
# table; for a block there is what the cluster says, and nothing is fitted to the bars of DCP.
PAIR_S = 14e-6
LIBRARY_LAUNCH_S, BLOCKWISE_LAUNCH_S = 300e-6, 900e-6
HARDWARE = Costs("hardware", {})
PUBLISHED = Costs(
    "published",
    {
        "library": Overheads(LIBRARY_LAUNCH_S, PAIR_S),
        "extended": Overheads(BLOCKWISE_LAUNCH_S, PAIR_S),
        "blockwise": Overheads(BLOCKWISE_LAUNCH_S, Cluster(1, 1).block_s),
    },
)
ALL_COSTS = (HARDWARE, PUBLISHED)
