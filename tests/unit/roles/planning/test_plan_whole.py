"""Whole plans of drawn runs: each is either a plan that adds up or a list of reasons, never an accident."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_rt.config.inventory import Inventory, load_inventory
from relax_rt.config.loader import load_config
from relax_rt.config.problems import Problem
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.evaluation.settings import EvaluatorSettings
from relax_rt.roles.planning.plan import HardwarePlan, plan_on
from relax_rt.roles.rollout.engines.settings import RolloutSettings
from relax_rt.roles.training.backend.settings import CriticSettings, ReferenceSettings, TrainerSettings

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"


def example(name: str) -> tuple[RLConfig, Inventory]:
    inventory = load_inventory(EXAMPLES / name / "nodes.toml")
    config = load_config(EXAMPLES / name / "roles.toml", inventory=inventory)
    assert isinstance(config, RLConfig)
    return config, inventory


BASES = [example("h100x8_qwen3_8b"), example("h100x16_qwen3_30b_a3b")]
GPUS = st.sampled_from(({}, {}, {}, {"gpus": 0}, {"gpus": 0.5}, {"gpus": 1}))
POWERS = st.sampled_from((1, 2, 4))
ANY = st.integers(1, 9)


@st.composite
def sharded(draw: st.DrawFn, kind: type[Any], experts: bool, wild: bool) -> Any:
    """A gang: one whose sizes divide each other and the model, or with `wild` whatever comes."""
    size = ANY if wild else POWERS
    tensor, pipeline = draw(size), draw(size)
    context = draw(st.sampled_from((1, 1, 2)))
    count = tensor * pipeline * context * draw(st.sampled_from((1, 1, 2)))
    table = {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "context_parallel": context, "count": count}
    if experts or wild:
        inner = [n for n in (1, 2, 4, 8) if wild or (count // pipeline) % n == 0]
        table["expert_parallel"] = draw(st.sampled_from(inner))
    table |= draw(GPUS) if wild or count == 1 else {}
    table["tokens_per_micro_batch"] = draw(st.sampled_from((1024, 8192, 16_384)))
    table["attention"] = draw(st.sampled_from(("fused", "unfused"))) if wild else "fused"
    table["recompute"] = "full"
    fields = {name: value for name, value in table.items() if name in kind.model_fields}
    return kind(backend="torch" if wild and draw(st.booleans()) else "megatron", **fields)


@st.composite
def engine(draw: st.DrawFn, kind: type[Any], experts: bool, wild: bool) -> Any:
    if not wild and draw(st.sampled_from((False, False, True))):
        return kind(
            count=draw(st.integers(1, 2 if kind is RolloutSettings else 1)), gpus=draw(st.sampled_from((0.5, 1)))
        )
    size = ANY if wild else POWERS
    table = {"tensor_parallel": draw(size), "data_parallel": draw(st.sampled_from((1, 1, 2)))}
    table["expert_parallel"] = draw(size) if wild else table["tensor_parallel"] if experts else 1
    table["count"] = draw(st.integers(1, 2) if kind is RolloutSettings else st.integers(0, 1))
    table["memory_fraction"] = draw(st.sampled_from((0.1, 0.8, 0.98))) if wild else 0.8
    return kind(engine="sglang", **table, **(draw(GPUS) if wild else {}))


@st.composite
def runs(draw: st.DrawFn) -> tuple[RLConfig, Inventory]:
    config, inventory = draw(st.sampled_from(BASES))
    experts, wild = config.run.name.startswith("qwen3-30b"), draw(st.integers(0, 4)) == 0
    roles = dict(config.roles)
    roles["trainer"] = draw(sharded(TrainerSettings, experts, wild))
    roles["rollout"] = draw(engine(RolloutSettings, experts, wild))
    roles["evaluator"] = draw(engine(EvaluatorSettings, experts, wild))
    for kind, settings_of in (("reference", ReferenceSettings), ("critic", CriticSettings)):
        if draw(st.integers(0, 4)) == 0:
            roles[kind] = draw(sharded(settings_of, experts, wild))
    if draw(st.integers(0, 4)):
        # GPUs and nodes of which more runs fit, so that both outcomes are seen.
        kinds = {name: kind.model_copy(update={"memory_gib": 640.0}) for name, kind in inventory.gpu.items()}
        first = inventory.nodes[0].model_copy(update={"memory_gib": 8000.0})
        more = [first.model_copy(update={"name": f"n{n}", "address": f"10.1.0.{n}"}) for n in range(6)]
        inventory = inventory.model_copy(update={"gpu": kinds, "nodes": more})
    return config.model_copy(update={"roles": roles}), inventory


@given(runs())
@settings(max_examples=300, deadline=None)
def test_every_run_is_planned_or_refused(run: tuple[RLConfig, Inventory]) -> None:
    config, inventory = run
    found = plan_on(config, inventory)
    if isinstance(found, list):
        assert found and all(isinstance(problem, Problem) and problem.message for problem in found)
        return
    _is_sound(found, config, inventory)
    assert found.render().startswith(f"{config.run.name}: planned, not run on this hardware")
    assert msgspec.json.decode(msgspec.json.encode(found))["heading"] == found.heading


def _is_sound(plan: HardwarePlan, config: RLConfig, inventory: Inventory) -> None:
    slots = {slot.slot: slot for slot in plan.slots}
    assert sorted(slots) == sorted(f"{k}/{n}" for k, table in config.roles.items() for n in range(table.count))
    used: Counter[tuple[str, int]] = Counter()
    for slot in plan.slots:
        for gpu in slot.gpus:
            used[slot.node, gpu] += slot.share  # type: ignore[assignment]
    assert all(share <= 1 + 1e-6 for share in used.values())
    assert {(account.node, account.gpu) for account in plan.gpus} == set(used)
    for account in plan.gpus:
        assert account.total == sum(part.bytes for share in account.shares for part in share.components)
        assert account.total <= account.capacity
    for host in plan.hosts:
        assert host.shared <= host.shared_capacity and host.total <= host.capacity
        assert host.total == sum(part.bytes for part in host.components)
    for gang in plan.gangs:
        for kind in {group.kind for group in gang.groups} - {"embedding"}:
            ranks = sorted(rank for group in gang.groups if group.kind == kind for rank in group.ranks)
            assert ranks == list(range(config.roles[gang.kind].count))
    for found in plan.communicators:
        if found.kind != "ipc":
            assert len(set(found.devices)) == len(found.devices) > 1, found
    listening = [(port.node, port.port) for port in plan.ports]
    assert len(set(listening)) == len(listening)
    assert all(inventory.ports.first <= port <= inventory.ports.last for _, port in listening)
