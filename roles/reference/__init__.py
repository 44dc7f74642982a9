"""The reference: log-probabilities of a frozen model, put on samples as a column."""

from relax_rt.roles.reference.role import ReferenceRole

__all__ = ["ReferenceRole"]
