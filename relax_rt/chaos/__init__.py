"""Inject faults into a living run, and judge by independent records whether it kept its guarantees."""
