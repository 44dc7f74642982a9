"""Runs over several nodes: who joins, who is lost, and which slot runs where."""
