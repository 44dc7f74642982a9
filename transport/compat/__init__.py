"""Doors for users of other packages: their interfaces, served by this package's own parts."""
