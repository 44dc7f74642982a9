"""This process among the ranks of a Megatron gang."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from relax_rt.roles.models.device import generator_states, set_generator_states
from relax_rt.roles.models.parallel import ParallelSizes, coordinates
from relax_rt.roles.training.backend.channel import COLLECTIVE_S, GATHER_S, GangRanks
from relax_rt.roles.training.megatron.shims import prepare
from relax_rt.transport.rpc.errors import Refused

GENERATOR = "generator_"
"""Before the kind of a device, or Megatron's name, in the name of a random generator's state."""


class MegatronRanks(GangRanks):
    """The process groups of a gang, and this rank's place in them. One a process.

    Args:
        store: torch's, where the ranks meet. rank, local_rank: among all, and among those of this node.
        seed: of Megatron's random states; nothing that this backend computes draws from them, a loss of the user's may.
        gather_s: deadline of each message of a publication that rank 0 receives, seconds.

    Raises:
        Refused: the sizes do not divide the ranks.
    """

    def __init__(
        self,
        sizes: ParallelSizes,
        store: Any,
        rank: int,
        *,
        local_rank: int = 0,
        seed: int = 1,
        gather_s: float = GATHER_S,
    ) -> None:
        prepare()
        self.sizes = sizes
        if sizes.world % sizes.model_ranks or sizes.world % sizes.expert_ranks:
            raise Refused(f"{sizes.world} ranks", why=f"{sizes} does not divide them")
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        if not dist.is_initialized():
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=store,
                rank=rank,
                world_size=sizes.world,
                timeout=timedelta(seconds=COLLECTIVE_S),
            )
        state = importlib.import_module("megatron.core.parallel_state")
        state.initialize_model_parallel(
            sizes.tensor,
            sizes.pipeline,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            create_gloo_process_groups=False,
        )
        importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(seed)
        self.at = coordinates(rank, sizes.dense)
        self.tensor_group: dist.ProcessGroup = state.get_tensor_model_parallel_group()
        self.context_group: dist.ProcessGroup = state.get_context_parallel_group()
        self.pipeline_group: dist.ProcessGroup = state.get_pipeline_model_parallel_group()
        super().__init__(rank, self.device, gather_s)
        self.replica, self.replicas = self.at["data"], sizes.data
        # Losses are computed on the last stage; of its ranks that compute the same ones, one is counted.
        self.last_stage = self.at["pipeline"] == sizes.pipeline - 1
        self.reports_loss = self.last_stage and self.at["tensor"] == 0 and self.at["context"] == 0
        # Whether a pass through the model needs other ranks; replicas of a whole model meet at a step's end alone.
        self.pass_together = sizes.model_ranks > 1 or sizes.expert_ranks > 1

    def from_last_stage(self, values: torch.Tensor) -> torch.Tensor:
        """The last stage's values on all stages of this replica."""
        if self.sizes.pipeline > 1:
            source = dist.get_process_group_ranks(self.pipeline_group)[-1]
            dist.broadcast(values, source, group=self.pipeline_group)
        return values

    def generators(self) -> dict[str, torch.Tensor]:
        """States of this rank's random generators, torch's and those that Megatron keeps apart, uint8 on the CPU; by
        the names under which a checkpoint has them."""
        states = {**generator_states(self.device), **self._tracker.get_states()}
        return {f"{self._place}|{GENERATOR}{kind}": state.clone() for kind, state in states.items()}

    def set_generators(self, find: Callable[[str, str], torch.Tensor | None]) -> None:
        """Resume from `generators`, as far as they are found: for ranks divided in another way there are none, for
        Megatron draws by a rank's place in the division.

        Args:
            find: gives what a checkpoint has under a name and a kind.
        """
        own = {kind: find(self._place, GENERATOR + kind) for kind in generator_states(self.device)}
        apart = {name: find(self._place, GENERATOR + name) for name in self._tracker.get_states()}
        if all(state is not None for state in apart.values()):
            self._tracker.set_states(apart)
        set_generator_states({kind: state for kind, state in own.items() if state is not None}, self.device)

    @property
    def _tracker(self) -> Any:
        return importlib.import_module("megatron.core.tensor_parallel").get_cuda_rng_tracker()

    @property
    def _place(self) -> str:
        """This rank in this division, on this kind of device, where a tensor has its name."""
        sizes = self.sizes
        cut = (sizes.tensor, sizes.pipeline, sizes.context, sizes.expert, sizes.expert_tensor, sizes.world)
        return f"rank-{self.rank}-of-{'x'.join(map(str, cut))}-{self.device.type}"

    def close(self) -> None:
        """Leave Megatron's groups and those of the gang."""
        importlib.import_module("megatron.core.parallel_state").destroy_model_parallel()
        super().close()
