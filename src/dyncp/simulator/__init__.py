"""Plans on a modelled cluster: how long they take, and what the time goes into."""

from dyncp.simulator.run import PassResult, Simulation, simulate

__all__ = ["PassResult", "Simulation", "simulate"]
