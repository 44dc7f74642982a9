"""The rewards that have names."""
