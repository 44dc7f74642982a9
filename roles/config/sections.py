"""The whole roles.toml of an RL run: the tables of all packages together."""

from __future__ import annotations

from relax_rt.config.schema import RunConfig
from relax_rt.roles.base.settings import ProgressTable
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.evaluation.settings import EvaluationTable
from relax_rt.roles.models.settings import ModelTable
from relax_rt.roles.rewards.settings import RewardTable
from relax_rt.roles.rollout.engines.settings import ColocationTable, SamplingTable
from relax_rt.roles.training.algorithms.settings import AlgorithmTable, ColdStartTable
from relax_rt.roles.training.backend.settings import CheckpointTable
from relax_rt.roles.training.publication.settings import PublicationTable


class RLConfig(RunConfig):
    """A whole roles.toml of an RL job."""

    model: ModelTable
    data: DataTable
    reward: RewardTable
    sampling: SamplingTable = SamplingTable()
    cold_start: ColdStartTable = ColdStartTable()
    algorithm: AlgorithmTable = AlgorithmTable()
    publication: PublicationTable = PublicationTable()
    colocation: ColocationTable = ColocationTable()
    checkpoint: CheckpointTable = CheckpointTable()
    progress: ProgressTable = ProgressTable()
    evaluation: EvaluationTable = EvaluationTable()
