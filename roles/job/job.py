"""The RL job: its tables and roles, what it needs, and the policy of the queue's ledger."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from relax_rt.config.job import AnswerReport, Column, InventoryPlan, Job, Pacing, PlanLine, TriedSample
from relax_rt.config.problems import BadInput, Problem
from relax_rt.config.schema import RoleSettings, RunConfig, SupervisionTable
from relax_rt.roles.agentic.settings import EnvSettings, env_settings, is_program
from relax_rt.roles.base.settings import ProgressTable
from relax_rt.roles.config.dtypes import choose_dtypes
from relax_rt.roles.config.progress import advice, stall_after_s
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.evaluation.settings import EvaluatorSettings
from relax_rt.roles.gateway.settings import GatewaySettings, check_gateway
from relax_rt.roles.models.cache import stage
from relax_rt.roles.models.tokenizer import load_tokenizer
from relax_rt.roles.planning.division import divisible
from relax_rt.roles.planning.placement import gpus_a_slot
from relax_rt.roles.report.summary import finish, render_summary
from relax_rt.roles.rewards.genrm.settings import GenrmSettings
from relax_rt.roles.rewards.settings import RewardSettings
from relax_rt.roles.rollout.engines.settings import EngineSettings, RolloutSettings
from relax_rt.roles.trackers.settings import WriterSettings, not_writable
from relax_rt.roles.training.algorithms.settings import SHARING
from relax_rt.roles.training.backend.settings import CriticSettings, ReferenceSettings, TrainerSettings
from relax_rt.roles.training.checkpoints.store import newest_step
from relax_rt.transport.queue.ledger.policy import LedgerPolicy

if TYPE_CHECKING:
    from relax_rt.config.inventory import Inventory

BEYOND_BOOT_S = 60.0
"""What a role takes to start besides the boot of its server."""
AHEAD = 64
"""Upper bound on the batches assumed to be generated before the first step, if max_staleness is infinite."""
IDLE = ("reward", "evaluator")
"""Roles whose work the env role does."""


class RLJob(Job):
    """GRPO over rollout, reward, trainer and evaluator. Implements also Planner of relax_rt.config.job."""

    Config: ClassVar[type[RunConfig]] = RLConfig
    Roles: ClassVar[Mapping[str, type[RoleSettings]]] = {
        "rollout": RolloutSettings,
        "reward": RewardSettings,
        "trainer": TrainerSettings,
        "evaluator": EvaluatorSettings,
    }
    Planned: ClassVar[Mapping[str, type[RoleSettings]]] = {
        "critic": CriticSettings,
        "env": EnvSettings,
        "gateway": GatewaySettings,
        "genrm": GenrmSettings,
        "reference": ReferenceSettings,
        "writer": WriterSettings,
    }
    one_node: ClassVar[Sequence[str]] = ("writer", "critic", "trainer", "evaluator", "env", "gateway")
    """They share checkpoints and metrics in files of one node. Rollouts elsewhere get their weights by a stream."""
    changeable: ClassVar[frozenset[str]] = frozenset(
        (
            *("algorithm.steps", "algorithm.learning_rate", "cold_start.learning_rate", "roles.critic.learning_rate"),
            *("algorithm.on_failed_member", "algorithm.min_group", "reward.timeout_s"),
            *(f"progress.{key}" for key in ProgressTable.model_fields),
            *(f"roles.env.{key}" for key in ("turn_timeout_s", "episode_timeout_s", "worker_memory_mib")),
            *(f"roles.{kind}.dtype" for kind in ("rollout", "evaluator", "trainer", "reference", "critic", "genrm")),
        )
    ) | frozenset(
        f"roles.trainer.{key}"
        for key in (
            *("backend", "count", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"),
            *("expert_tensor_parallel", "sequence_parallel", "distributed_optimizer", "recompute", "attention"),
            *("layers", "tokens_per_micro_batch", "gpus", "threads"),
        )
    )
    """A checkpoint can be read with another parallel layout, by the other backend and in another dtype, because the
    optimizer's weights are float32. A finished run can be resumed with more steps, and one that ended without progress
    with other limits."""
    headline: ClassVar[Sequence[Column]] = (
        Column("cold_start", "loss", "", line="cold start ({phase}): step {step}/{of}  loss {loss:.4f}"),
        Column(
            "cold_start",
            "validation_loss",
            "",
            line="cold start ({phase}): step {step}/{of}  validation loss {validation_loss:.4f}",
        ),
        Column("step", "reward_mean", "reward", ".3f", spark=True),
        Column("step", "staleness", "staleness", ".1f", aggregate="mean_max"),
        Column("step", "grad_norm", "gradient norm", ".2f"),
        Column("step", "clip_fraction", "clipped", ".1%"),
        Column("step", "wait_s", "trainer waits s", ".1f"),
        Column("rollout", "tokens", "tokens/s", ".0f", aggregate="rate"),
        Column("queue", "outstanding", "queue", of="bound"),
        Column(
            "evaluation",
            "exact",
            "held-out exact",
            ".1%",
            line="held out, {when} (step {step}): {exact:.1%} of {items} exact [{exact_low:.1%}, {exact_high:.1%}]",
        ),
    )

    def advice(self, config: Any, loss: Mapping[str, Any]) -> str:
        """Return the setting that helps against a loss in the queue."""
        return advice(config, loss)

    def stall_after_s(self, config: Any) -> float | None:
        """Derive the stall limit from the slowest role's own deadlines, with a margin."""
        return stall_after_s(config)

    def past(self, run_dir: Path) -> dict[str, str]:
        """Refuse a new learning rate for a cold start that has finished."""
        from relax_rt.roles.training.checkpoints.cold_start import cold_start_weights

        folder = cold_start_weights(run_dir)
        return {"cold_start.learning_rate": f"the cold start is over: {folder} has the weights"} if folder else {}

    def resumes_at(self, run_dir: Path) -> int | None:
        """Return the step of the newest checkpoint."""
        return newest_step(run_dir / "checkpoints")

    def assumed(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Add [data] and [reward] where [roles.env] makes prompts and rewards."""
        roles = data.get("roles")
        env = roles.get("env") if isinstance(roles, dict) else None
        return {"data": {}, "reward": {"function": ""}} if isinstance(env, dict) and "target" not in env else {}

    def settled(self, roles: dict[str, RoleSettings], supervision: SupervisionTable) -> dict[str, RoleSettings]:
        """Extend the start deadline of engine servers, and start no reward and evaluator beside [roles.env].

        A `count` in the table of reward or evaluator overrides this.
        """
        roles = {kind: _with_time_to_start(table, supervision) for kind, table in roles.items()}
        if not isinstance(roles.get("env"), EnvSettings):
            return roles
        idle = {
            kind: table.model_copy(update={"count": 0})
            for kind in IDLE
            if (table := roles.get(kind)) is not None and "count" not in table.model_fields_set and not table.target
        }
        return {**roles, **idle}

    def choose(self, config: Any, recorded: Mapping[str, Any], *, measured: bool, here: bool) -> RunConfig:
        """Resolve the dtypes that are "auto"."""
        return choose_dtypes(config, recorded, measured=measured, here=here)

    def absent(self, config: RLConfig) -> list[str]:
        """Return the roles whose work the env role does."""
        if env_settings(config) is None:
            return []
        return [kind for kind in IDLE if kind in config.roles and not config.roles[kind].count]

    def check(self, config: Any, config_dir: Path) -> list[Problem]:
        """Run the cheap checks across keys."""
        from relax_rt.roles.config.checks import check

        return check(config)

    def missing_inputs(self, config: Any, config_dir: Path) -> list[Problem]:
        """Check that models, data files and user code exist."""
        from relax_rt.roles.config.inputs import missing_inputs

        return list(missing_inputs(config, config_dir))

    def preflight(self, config: Any, config_dir: Path, *, answers: bool = True) -> list[Problem]:
        """Load tokenizer, data and reward function, and run them once."""
        with stage("quick checks passed; importing torch and transformers"):
            from relax_rt.roles.job.preflight import preflight
        return preflight(config, config_dir, answers=answers)

    def check_answers(self, config: Any) -> list[AnswerReport] | None:
        """Score every right answer of the data against itself."""
        from relax_rt.roles.agentic.rewards import reward_table
        from relax_rt.roles.rewards.answer_checks import answer_reports

        return answer_reports(reward_table(config), config.data, Path(config.config_dir), every=True)

    def plan(self, config: Any) -> list[PlanLine]:
        """Return memory, data, steps and processes of the run."""
        from relax_rt.roles.planning.estimate import plan

        return plan(config)

    def startable(self, config: Any) -> list[Problem]:
        """Return what this version can plan but not start."""
        from relax_rt.roles.config.checks import not_startable

        return [*divisible(config), *not_startable(config), *not_writable(config), *check_gateway(config)]

    def plan_on(self, config: Any, inventory: Inventory) -> InventoryPlan | list[Problem]:
        """Plan the run for the machines of an inventory."""
        from relax_rt.roles.planning.plan import plan_on

        return plan_on(config, inventory)

    def ledger_policy(self, config: Any) -> LedgerPolicy:
        """Return the policy of the queue's ledger. With data.epochs set, the data is read to count the prompts."""
        from relax_rt.roles.base.sample import task_fields
        from relax_rt.roles.data.media.image_processor import run_has_vision

        table = config.algorithm
        return LedgerPolicy(
            group_size=table.group_size,
            prompts_per_step=table.prompts_per_step,
            max_staleness=table.max_staleness,
            tasks=task_fields(
                config.roles, rewarded=env_settings(config) is not None, has_vision=run_has_vision(config)
            ),
            on_straggler=table.on_straggler,
            straggler_wait_s=table.straggler_wait_s,
            over_provision=table.over_provision,
            on_surplus=table.on_surplus,
            on_failed_member=table.on_failed_member,
            min_group=min(table.min_group, table.group_size),
            prompts=None if config.data.epochs is None else _prompt_limit(config),
            failed_groups=config.progress.failed_groups,
            failed_prompts=config.progress.failed_prompts,
            item_timeouts=config.progress.item_timeouts,
            kept_items=tuple(config.progress.kept_items),
        )

    def steps(self, config: Any) -> int | None:
        """Return algorithm.steps."""
        return int(config.algorithm.steps)

    def pacing(self, config: Any) -> Pacing:
        """Return the metrics of a step's time: rollouts work ahead up to max_staleness, and evaluations repeat."""
        table = config.algorithm
        shared = table.mode in SHARING
        ahead = 0 if shared else int(min(table.max_staleness, AHEAD))
        return Pacing("wait_s", ("train_s", "publish_s"), ahead, ("evaluation", "evaluation_set"), _contention(config))

    def shm_bytes(self, config: Any) -> int:
        """Return the size of the weight stage in bytes."""
        from relax_rt.roles.planning.estimate import stage_bytes

        return stage_bytes(config)

    def finished(self, config: Any) -> str:
        """Return that the trainer has done its steps."""
        return f"all {config.algorithm.steps} steps are done"

    def finish(self, run_dir: Path, config: Any) -> dict[str, Any]:
        """Write summary.json and the plots."""
        return finish(run_dir, config)

    def closing(self, summary: dict[str, Any]) -> list[str]:
        """Render summary.json as lines for people."""
        return render_summary(summary)

    def sample(
        self, config: Any, run_dir: Path | None, items: int, *, held_out: bool = False, prompts: Sequence[str] = ()
    ) -> list[TriedSample]:
        """Generate and score samples with the model of the config or of a checkpoint."""
        from relax_rt.roles.job.try_out import sample

        env = env_settings(config)
        if env is not None:
            why = "its episodes are played by [roles.env], with several turns"
            by_hand = "start the program by hand beside a run (docs/guides/programs.md, By hand)"
            in_python = "Runtime.from_toml(…, debug=True) plays single ones (docs/guides/embedding.md, Breakpoints)"
            raise BadInput("relax-rt sample", why=why, hint=by_hand if is_program(env) else in_python)

        return sample(config, run_dir, items, held_out=held_out, prompts=prompts)


def _with_time_to_start(table: RoleSettings, rules: SupervisionTable) -> RoleSettings:
    if not isinstance(table, EngineSettings) or table.engine != "sglang" or table.start_timeout_s is not None:
        return table
    needed_s = max(rules.start_timeout_s, table.sglang.boot_timeout_s + BEYOND_BOOT_S)
    return table.model_copy(update={"start_timeout_s": needed_s})


def _prompt_limit(config: RLConfig) -> int | None:
    from relax_rt.roles.data.source import PromptSource
    from relax_rt.roles.models.resolve import resolve_model

    config_dir = Path(config.config_dir)
    tokenizer = load_tokenizer(resolve_model(config.model.path, config_dir))
    return PromptSource.load(config.data, tokenizer, seed=config.run.seed, config_dir=config_dir).limit


def _contention(config: RLConfig) -> float:
    """Slowdown of trainer and evaluator while both compute; 1: they share no cores of this machine."""
    tables = (config.roles["trainer"], config.roles["evaluator"])
    if not all(table.count for table in tables) or any(t.cpus or t.node or gpus_a_slot(t) for t in tables):
        return 1.0
    threads: int = sum(table.threads * table.count for table in tables)
    return max(1.0, threads / len(os.sched_getaffinity(0)))
