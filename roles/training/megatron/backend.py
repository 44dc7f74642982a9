"""One rank of the Megatron-Core trainer backend."""

from __future__ import annotations

import importlib
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from relax_rt.roles.base.sample import Sample, bare_meta
from relax_rt.roles.models.device import denormals_flushed
from relax_rt.roles.models.heap import trim_heap
from relax_rt.roles.models.settings import TrainedSettings
from relax_rt.roles.training.algorithms.inputs import Metrics, TokenTensors, merge
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.settings import AlgorithmTable, learning_rate
from relax_rt.roles.training.backend.channel import WeightChannel
from relax_rt.roles.training.backend.interface import GradientPart, StepResult, skipped_result, step_result
from relax_rt.roles.training.batch.budget import GradientAccumulation, MemoryRetry, TokenBudget
from relax_rt.roles.training.checkpoints.optimizer_state import (
    MASTER,
    OptimizerFiles,
    ReadBlock,
    await_files,
    rank_file,
    write_blocks,
)
from relax_rt.roles.training.checkpoints.store import TOKENIZER_FILES
from relax_rt.roles.training.megatron.layout import ModelDivision, naming_of
from relax_rt.roles.training.megatron.model import (
    DTYPES,
    Wanted,
    build,
    choose_layers,
    padded_vocabulary,
    read_architecture,
    sequence_parallel,
    transformer_config,
)
from relax_rt.roles.training.megatron.passes import Pack, Passes, at_wanted_tokens, fill_packs, pack
from relax_rt.roles.training.megatron.ranks import MegatronRanks
from relax_rt.roles.training.megatron.resharding import (
    ReshardPlan,
    check_shards,
    gather_weights,
    plan_buckets,
    publish_weights,
)
from relax_rt.roles.training.megatron.state import HfModelFiles, OptimizerState, with_tied_copy
from relax_rt.roles.training.megatron.state import fill_parameter as fill_tensor
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.weights.manifest import BUCKET_BYTES, Layout

MODEL_FILES = ("config.json", "generation_config.json")


class MegatronBackend:
    """A rank's part of model and optimizer. Every rank makes the same calls in the same order.

    Args:
        model_dir: Hugging Face folder. table: division, dtype and micro-batches.
        objective: unless given, that of the algorithm.
        budget: of micro-batches; unless given, the table's. All ranks take the smallest of theirs.
        stacked_experts: publish each layer's experts as one tensor, as transformers has them, else one by one.

    Raises:
        Refused: model or settings ask for what this backend cannot do.
    """

    takes_branches = False

    def __init__(
        self,
        model_dir: Path,
        algorithm: AlgorithmTable,
        table: TrainedSettings,
        ranks: MegatronRanks,
        *,
        temperature: float,
        objective: Objective | None = None,
        stacked_experts: bool = True,
        layers: Wanted = "auto",
        on_progress: Callable[[int], None] = lambda _: None,
        budget: TokenBudget | None = None,
    ) -> None:
        torch.set_num_threads(table.threads)
        self._source, self._algorithm, self._table, self.ranks = model_dir, algorithm, table, ranks
        self._stacked = stacked_experts
        self.objective = objective if objective is not None else Objective.of(algorithm)
        self._budget = budget if budget is not None else TokenBudget(table.tokens_per_micro_batch)
        self._budget.agree(ranks.gather)
        together = f"rank {ranks.rank} of the trainer" if ranks.pass_together else ""
        self._fitting = MemoryRetry(self._budget, ranks.device, rank=together)
        self._accumulation: GradientAccumulation[Sequence[Sample]] = GradientAccumulation(
            self._fitting, self._begin, self._add
        )
        architecture = read_architecture(model_dir)
        self._shape = architecture.shape
        chosen = choose_layers(layers).layers
        config = transformer_config(architecture, table, chosen)
        self.model = build(architecture, config, ranks.sizes, chosen)
        self.parameters = {(0, name): p for name, p in self.model.named_parameters()}
        self._division = ModelDivision(
            sizes=ranks.sizes,
            naming=naming_of([name for _, name in self.parameters]),
            padded_vocabulary=padded_vocabulary(self._shape, ranks.sizes),
        )
        self._plans: dict[tuple[str, bool], ReshardPlan] = {}
        held, _ = self._plan(table.dtype, stacked=False).held(ranks.rank)
        check_shards(self._plan(table.dtype, stacked=False), ranks.rank, self._shards)
        self._held = with_tied_copy(self._shape, held, self.parameters, ranks.at["tensor"])
        self._mark()
        self._wrapped = _wrapped(self.model, config, table)
        self._optimizer = _optimizer(self._wrapped, algorithm, table)
        self._state = OptimizerState(self._optimizer, self.parameters)
        # Of what all tensor-parallel ranks hold alike, and of copies, one is written.
        self._mine = frozenset(place for place, local in held.items() if not local.whole or ranks.at["tensor"] == 0)
        self._passes = Passes(
            ranks,
            config,
            self._wrapped,
            self.model,
            vocabulary=self._shape.vocabulary,
            temperature=temperature,
            entropy="entropy" in self.objective.needs,
            on_progress=on_progress,
            before=self._trying,
        )
        self._multiple = (table.tensor_parallel if sequence_parallel(table) else 1) * 2 * table.context_parallel
        self._snapshot: dict[str, torch.Tensor] | None = None
        self._snapshot_steps, self._snapshot_model = 0, bytearray()
        self._snapshot_generators: dict[str, torch.Tensor] = {}
        self._load(HfModelFiles(model_dir))
        self._begin()

    def _mark(self) -> None:
        """Set attributes of parameters that Megatron relies on and does not set itself."""
        for place, local in self._held.items():
            parameter: Any = self.parameters[place]
            # It is noted where weights are initialised, which is left out; the norm of all gradients rests on it.
            parameter.tensor_model_parallel = not local.whole
            if ".mlp.experts." in place[1]:
                # Replicas of experts are other ranks than those of dense layers, also without expert parallelism.
                parameter.allreduce = False

    def use(self, objective: Objective, table: AlgorithmTable, *, temperature: float | None = None) -> None:
        """Take steps of another objective from now on; the moments start anew."""
        self.objective, self._algorithm = objective, table
        self._passes.use(temperature=temperature, entropy="entropy" in objective.needs)
        for group in self._optimizer.param_groups:
            group["betas"], group["weight_decay"] = table.adam_betas, table.weight_decay
        self._state.forget()
        # Its buffers hold moments that are no more.
        self._snapshot = None
        self._forget()

    # Gradients.

    def keeps_groups_together(self, samples: Sequence[Sample]) -> bool:
        """Whether the samples of a group go to one replica: only where the loss compares them."""
        return "pairs" in self.objective.needs

    def log_probabilities(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Compute the log-probability of each trained token, of logits / temperature: float32 [T] for each sample, 0
        for others. The same on all ranks of the replica whose samples these are."""
        return self._fitting(lambda: self._log_probabilities(samples))

    def _log_probabilities(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        trained = [sample if sample.loss_mask[1:].any() else None for sample in samples]
        packs = [self._pack(members, trained_only=True) for members in self._filled(trained)]
        packs += self._dummies(len(packs))
        found = [np.zeros(len(sample.tokens), np.float32) for sample in samples]
        with denormals_flushed():
            values = self._passes.log_probabilities(packs)
        for one, value in zip(packs, values, strict=True):
            for number, (index, _) in enumerate(one.members):
                if index >= 0:
                    mine = one.sequence == number
                    found[index][one.at[mine].numpy()] = value[mine].numpy()
        return found

    def accumulate(self, samples: Sequence[Sample]) -> GradientPart:
        """Add the gradients of this replica's share of a batch, which may be empty; they are divided by nothing."""
        self._accumulation(samples)
        return GradientPart(self.objective.count(samples), sum(int(sample.loss_mask.sum()) for sample in samples))

    def _add(self, samples: Sequence[Sample]) -> None:
        """Add the gradients of these samples, and what is measured of them."""
        idle = self.objective.idle
        trained = [sample if sample.loss_mask[1:].any() and not idle(sample) else None for sample in samples]
        packs = [self._pack(members, trained_only=True) for members in self._filled(trained)]
        dummies = self._dummies(len(packs))
        with denormals_flushed():
            results = self._passes.backward([*packs, *dummies], self._loss, len(dummies))
        if self.ranks.reports_loss:
            tokens = float(sum(int(sample.loss_mask.sum()) for sample in samples))
            merge(self._found, {"trained": tokens, "computed": float(sum(one.tokens for one in packs))})
            for value, metrics in results:
                merge(self._found, {"loss": value, **metrics})

    def _loss(self, of: Pack, logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        return self.objective.loss(tokens_of(of, logprobs, entropy if "entropy" in self.objective.needs else None))

    def apply(self, count: float, number: int, before_update: Callable[[], None] = lambda: None) -> StepResult:
        """Divide the gradients of all ranks, clip them and take the optimizer's step. All ranks return the same."""
        importlib.import_module("megatron.core.distributed").finalize_model_grads([self._wrapped])
        merge(self._found, self._fitting.taken())
        found: Metrics = {}
        for part in self.ranks.gather(self._found):
            merge(found, part)
        rate = learning_rate(self._algorithm, number, self._algorithm.steps)
        count = count if count > 0 else 1.0
        self._wrapped.scale_gradients(1.0 / count)
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        finite = all(self.ranks.gather(math.isfinite(norm)))
        loss = found.get("loss", 0.0)
        if not finite or not math.isfinite(loss):
            self._forget()
            what = f"gradient norm is {norm}" if math.isfinite(loss) else f"loss is {loss}"
            return skipped_result(f"{what} in step {number}", found, rate)
        if found.get("tokens"):
            clip = importlib.import_module("megatron.core.optimizer.clip_grads").clip_grad_by_total_norm_fp32
            for optimizer in self._optimizer.chained_optimizers:
                parameters = [] if getattr(optimizer, "is_stub_optimizer", False) else optimizer.get_parameters()
                if parameters:
                    clip(parameters, max_norm=self._algorithm.max_grad_norm, total_norm=norm)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            before_update()
            with denormals_flushed():
                self._optimizer.step_with_ready_grads()
        self._forget()
        self.objective.after_step(found)
        return step_result(found, count=count, grad_norm=norm, learning_rate=rate)

    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's sums so far, by Megatron's name; those of replicas are not in them."""
        return {name: parameter.main_grad.detach().clone() for (_, name), parameter in self.parameters.items()}

    def _forget(self) -> None:
        """End the step: the next part begins another one."""
        self._accumulation.forget()
        self._begin()

    def _begin(self) -> None:
        """Clear gradients and metrics."""
        self._wrapped.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._found: Metrics = {}

    def _filled(self, samples: Sequence[Sample | None]) -> list[list[tuple[int, Sample]]]:
        there = [(index, sample) for index, sample in enumerate(samples) if sample is not None]
        return fill_packs(there, self._budget.tokens, whole_groups="pairs" in self.objective.needs)

    def _pack(self, members: Sequence[tuple[int, Sample]], *, trained_only: bool) -> Pack:
        context = self._table.context_parallel
        chunks = 2 * context if context > 1 else 1
        return pack(members, multiple=self._multiple, trained_only=trained_only, sequence_multiple=chunks)

    def _trying(self, one: Pack) -> None:
        pairs = "pairs" in self.objective.needs
        units = {sample.meta.group if pairs else number for number, (_, sample) in enumerate(one.members)}
        self._budget.attempting_units(one.tokens, len(units), whole_groups=pairs)

    def _dummies(self, packs: int) -> list[Pack]:
        """Packs that count for nothing: ranks that exchange tokens of experts make the same number of passes."""
        if self.ranks.sizes.expert_ranks == self.ranks.sizes.pipeline:
            return []
        most = max(self.ranks.gather(packs))
        return [self._pack([(-1, _EMPTY_SAMPLE)], trained_only=True) for _ in range(most - packs)]

    # Weights.

    @property
    def _shards(self) -> list[Mapping[str, torch.Tensor]]:
        return [{name: parameter for (_, name), parameter in self.parameters.items()}]

    def _plan(self, dtype: str, *, stacked: bool) -> ReshardPlan:
        key = (dtype, stacked and self._shape.experts > 0)
        if key not in self._plans:
            rows = max(self._shape.hidden, self._shape.ffn, self._shape.query) * 4
            self._plans[key] = plan_buckets(
                self._shape,
                self._division,
                dtype=dtype,
                bucket_bytes=max(BUCKET_BYTES, rows),
                stacked_experts=key[1],
            )
        return self._plans[key]

    def layout(self, dtype: str) -> Layout:
        """Where `export` puts each tensor."""
        return self._plan(dtype, stacked=self._stacked).layout

    def export(self, into: memoryview | None, dtype: str, copied: Callable[[], None] = lambda: None) -> None:
        """Write the weights of all ranks into rank 0's buffer, beside other calls."""
        plan = self._plan(dtype, stacked=self._stacked)
        publish_weights(plan, self.ranks.publication, self._shards, into, copied)

    def _load(self, files: HfModelFiles, masters: ReadBlock | None = None) -> None:
        """Weights from Hugging Face files; float32 copies of bfloat16 ones from `masters`, or the same files."""
        files.check(self._shape)
        with torch.no_grad():
            for place, parameter in self.parameters.items():
                fill_tensor(parameter.detach().view(-1), self._held[place], files)
            self._state.masters(self._held, masters or files)

    # Checkpoints.

    def snapshot(self) -> None:
        """Copy weights and optimizer state aside; `write_blocks` saves the copy while training continues."""
        self._snapshot = {} if self._snapshot is None else self._snapshot
        self._state.copy(self._held, self._mine, self._snapshot)
        self._snapshot_steps = self._state.steps
        self._snapshot_generators = self.ranks.generators()
        trim_heap()
        plan = self._plan(self._table.dtype, stacked=False)
        if self.ranks.rank == 0 and not self._snapshot_model:
            self._snapshot_model = bytearray(plan.layout.nbytes)
        into = memoryview(self._snapshot_model) if self.ranks.rank == 0 else None
        gather_weights(plan, WeightChannel(self.ranks.control), self._shards, into)

    def write(self, folder: Path) -> None:
        """Write the last snapshot: each rank its optimizer's state, rank 0 the model in Hugging Face format. Rank 0
        returns when the files of all ranks are there. No collectives: training may continue.

        Raises:
            Refused: no snapshot was taken. DeadlineExceeded: another rank's file does not come.
        """
        ranks = self.ranks
        if self._snapshot is None:
            raise Refused(f"write checkpoint {folder}", why="no snapshot was taken")
        kept = {**self._snapshot, **self._snapshot_generators}
        write_blocks(rank_file(folder, ranks.rank, ranks.sizes.world), kept, self._snapshot_steps)
        if ranks.rank != 0:
            return
        layout = self._plan(self._table.dtype, stacked=False).layout
        flat = torch.frombuffer(self._snapshot_model, dtype=torch.uint8)
        dtype = DTYPES[self._table.dtype]
        tensors = {e.name: flat[e.offset : e.offset + e.nbytes].view(dtype).view(e.shape) for e in layout.entries}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for pattern in (*MODEL_FILES, *TOKENIZER_FILES):
            for path in self._source.glob(pattern):
                shutil.copyfile(path, folder / path.name)
        await_files(folder, ranks.sizes.world)

    def restore(self, folder: Path) -> None:
        """Take model and optimizer state from a checkpoint folder, however the ranks that wrote it were divided.
        Nothing is changed before all of it was found there.

        Raises:
            Refused: it is of another model, or lacks something. SafetensorError: a file is truncated.
        """
        state, files = OptimizerFiles(folder), HfModelFiles(folder)
        files.check(self._shape)
        self._state.check(self._held, state)
        self._load(files, state.reader(MASTER) if state.has(MASTER) else None)
        self._state.take(self._held, state)
        self.ranks.set_generators(state.tensor)
        self._snapshot = None
        self._forget()


def tokens_of(of: Pack, logprobs: torch.Tensor, entropy: torch.Tensor | None) -> TokenTensors:
    """A pack's trained tokens as losses see them."""
    samples = [sample for _, sample in of.members]
    groups = {group: number for number, group in enumerate(dict.fromkeys(s.meta.group for s in samples))}

    def there(columns: Sequence[NDArray[np.float32] | None]) -> torch.Tensor | None:
        found = [values for values in columns if values is not None]
        return at_wanted_tokens(of, found).to(logprobs) if len(found) == len(columns) else None

    behaviour, advantages = there([s.behaviour_logprobs for s in samples]), there([s.advantages for s in samples])
    assert behaviour is not None
    return TokenTensors(
        logprobs=logprobs,
        behaviour=behaviour,
        advantages=advantages if advantages is not None else torch.zeros_like(behaviour),
        mask=torch.ones_like(logprobs, dtype=torch.bool),
        sequence=of.sequence.to(logprobs.device),
        proximal=there([s.proximal_logprobs for s in samples]),
        reference=there([s.reference_logprobs for s in samples]),
        group=torch.tensor([groups[s.meta.group] for s in samples])[of.sequence].to(logprobs.device),
        entropy=entropy,
    )


_EMPTY_SAMPLE = Sample(
    meta=bare_meta(0, 0),
    tokens=np.zeros(2, np.int32),
    loss_mask=np.array([0, 1], np.uint8),
    behaviour_logprobs=np.zeros(2, np.float32),
    versions=[],
)


def _wrapped(model: Any, config: Any, table: TrainedSettings) -> Any:
    """Megatron's data parallelism around the model: gradients in a buffer, reduced when they are asked for."""
    distributed = importlib.import_module("megatron.core.distributed")
    options = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=table.gradient_dtype == "float32",
        use_distributed_optimizer=table.distributed_optimizer,
        overlap_grad_reduce=False,
    )
    if config.bf16:
        model = importlib.import_module("megatron.core.transformer.module").Float16Module(config, model)
    wrapped = distributed.DistributedDataParallel(config, options, model)
    wrapped.train()
    return wrapped


def _optimizer(wrapped: Any, algorithm: AlgorithmTable, table: TrainedSettings) -> Any:
    optimizers = importlib.import_module("megatron.core.optimizer")
    moments = DTYPES[table.optimizer_dtype]
    config = optimizers.OptimizerConfig(
        optimizer="adam",
        lr=algorithm.learning_rate,
        weight_decay=algorithm.weight_decay,
        adam_beta1=algorithm.adam_betas[0],
        adam_beta2=algorithm.adam_betas[1],
        adam_eps=1e-8,
        params_dtype=DTYPES[table.dtype],
        bf16=table.dtype == "bfloat16",
        use_distributed_optimizer=table.distributed_optimizer,
        clip_grad=algorithm.max_grad_norm,
        use_precision_aware_optimizer=moments is not torch.float32,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
    )
    # Without overrides Megatron spares norms and biases the weight decay; the torch backend does not.
    return optimizers.get_megatron_optimizer(config, [wrapped], config_overrides={}, use_gloo_process_groups=False)
