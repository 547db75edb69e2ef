"""What computation and transfers take: modelled devices and links, shared by the planner and the simulator."""
