"""Weights to several devices by a collective that can always be ended: each rank is a process of its own."""
