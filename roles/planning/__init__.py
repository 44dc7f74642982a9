"""Plans of runs on hardware that is not here: placement, ranks, ports, memory, the arithmetic of a step."""
