"""What spans the nodes of a run: registry, discovery, membership and placement."""
