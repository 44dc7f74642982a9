"""Weights from the trainer to the engines: who stages, who commits, who fetches when, and who is out."""
