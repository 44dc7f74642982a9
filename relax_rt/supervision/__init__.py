"""The supervisor of a run, and the agent that carries out its decisions on this node."""
