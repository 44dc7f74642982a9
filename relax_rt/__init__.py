"""relax-rt: asynchronous RL post-training on bare-metal nodes, as restartable processes."""

__version__ = "0.1.0"
