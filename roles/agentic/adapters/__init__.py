"""Environments of other packages: modules with `factory(name, options)`. They block, so that they run in workers."""
