"""Inject faults into a live run, and judge by independent records whether it kept its guarantees."""
