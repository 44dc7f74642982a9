"""Makes the helper modules of this folder importable in the folders below it."""
