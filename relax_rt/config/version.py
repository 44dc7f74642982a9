"""The version of this package: nodes that join compare it, and a run directory says which version wrote it."""

VERSION = "0.1.0"
