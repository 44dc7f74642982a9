"""Modules of this folder are importable by all tests, and their fixtures known to them."""

from netns import nodes

__all__ = ["nodes"]
