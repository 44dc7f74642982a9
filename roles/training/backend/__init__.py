"""What trainer backends share: their interface, the gang of ranks, the channel that brings weights to rank 0."""
