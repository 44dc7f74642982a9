"""Interfaces of other packages, served by this package's own parts."""
