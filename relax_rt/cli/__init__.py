"""The command line, `relax-rt`."""
