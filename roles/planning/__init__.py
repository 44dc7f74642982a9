"""Plans of runs on hardware that is not here: placement, groups of ranks, ports, memory and the arithmetic of a step."""
