"""Plans of runs: memory and processes here; placement, ranks, ports, memory and figures on machines of an inventory."""
