"""Adapters for environments of other packages, run in workers: modules with `factory(name, options)`."""
