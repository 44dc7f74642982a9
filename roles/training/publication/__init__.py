"""Weights from the trainer to the engines: who stages, who commits, who fetches when, and who is out."""

from relax_rt.roles.base.locations import stage_folder
from relax_rt.roles.training.publication.follower import EngineFailure, EngineOut, WeightFollower, committed_versions

__all__ = ["EngineFailure", "EngineOut", "WeightFollower", "committed_versions", "stage_folder"]
