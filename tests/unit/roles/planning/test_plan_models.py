"""Memory of roles with models of their own, of a cold start, and of engines while weights are swapped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_rt.config.inventory import load_inventory
from relax_rt.config.loader import load_config
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.models.shape import read_shape
from relax_rt.roles.planning.figures import longest_sample, longest_trained
from relax_rt.roles.planning.plan import HardwarePlan, plan_on

FOLDER = Path(__file__).resolve().parents[4] / "examples/h100x8_qwen3_8b"
ROOM = ("roles.evaluator.count=0", "evaluation.every_steps=0", "roles.rollout.count=2")
TEACHER = (*ROOM, "algorithm.name=distillation", "roles.reference.count=2", "roles.reference.gpus=1")
PUBLISHED = 2 * 8_190_735_360


def config_of(*overrides: str, folder: Path = FOLDER) -> RLConfig:
    config = load_config(folder / "roles.toml", overrides, inventory=load_inventory(folder / "nodes.toml"))
    assert isinstance(config, RLConfig)
    return config


def planned(*overrides: str, folder: Path = FOLDER) -> HardwarePlan:
    found = plan_on(config_of(*overrides, folder=folder), load_inventory(folder / "nodes.toml"))
    assert isinstance(found, HardwarePlan), found
    return found


def memory(plan: HardwarePlan, slot: str) -> dict[str, int]:
    (share,) = (share for gpu in plan.gpus for share in gpu.shares if share.slot == slot)
    return {part.name: part.bytes for part in share.components}


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """A model of half the policy's layers."""
    values = json.loads((FOLDER / "model/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 18}))
    return tmp_path


def test_each_slot_of_a_teacher_has_all_of_its_own_model_in_float32(teacher: Path) -> None:
    plan = planned(*TEACHER, f"roles.reference.model={teacher}")
    parameters = read_shape(teacher).parameters
    assert parameters < 5e9
    for slot in ("reference/0", "reference/1"):
        assert memory(plan, slot)["weights"] == 4 * parameters
    # They are no gang: none meets the other.
    assert [gang.kind for gang in plan.gangs] == ["trainer"]
    assert not [port for port in plan.ports if "reference" in port.what]
    assert not [one for one in plan.communicators if any("reference" in member for member in one.members)]
    assert memory(planned(*TEACHER), "reference/0")["weights"] == 4 * 8_190_735_360


def test_of_a_model_that_is_not_there_nothing_is_said(tmp_path: Path) -> None:
    plan = planned(*TEACHER, f"roles.reference.model={tmp_path}/none")
    assert memory(plan, "reference/0") == {"model": 0}
    assert "unknown" in plan.render() and "config.json cannot be read" in plan.render()
    cores = planned(*TEACHER, f"roles.reference.model={tmp_path}/none", "roles.reference.gpus=0")
    (part,) = (part for host in cores.hosts for part in host.components if part.name == "models on cores")
    assert part.bytes == 0 and "reference/0, reference/1" in part.how


def test_a_judge_has_its_own_model_too(teacher: Path) -> None:
    judge = ("roles.genrm.gpus=1", "roles.genrm.dtype=bfloat16", "roles.genrm.max_sequences=4", "roles.genrm.count=1")
    plan = planned(*ROOM, *judge, f"roles.genrm.model={teacher}", 'reward.judge.prompt="{question} {completion}"')
    assert memory(plan, "genrm/0")["weights"] == 2 * 2 * read_shape(teacher).parameters


def test_a_cold_start_may_have_longer_sequences_than_rl() -> None:
    small = ("roles.trainer.tokens_per_micro_batch=4096", "sampling.max_new_tokens=2048", "data.max_prompt_tokens=512")
    cold = (*small, "cold_start.answers=true", "cold_start.max_tokens=12000")
    without, config = config_of(*small), config_of(*cold)
    assert longest_trained(without) == longest_sample(without) == 2560
    assert (longest_trained(config), longest_sample(config)) == (12_000, 2560)
    pairs = config.cold_start.model_copy(update={"kind": "dpo"})
    assert longest_trained(config.model_copy(update={"cold_start": pairs})) == 24_000
    before, after = memory(planned(*small), "trainer/0"), memory(planned(*cold), "trainer/0")
    assert after["logits"] == before["logits"] * 12_000 // 4096
    assert after["activations"] > 2.5 * before["activations"] and after["weights"] == before["weights"]


@pytest.mark.parametrize("on", ["gpus", "cores"])
def test_ranks_but_the_first_keep_their_parts_of_a_publication(on: str) -> None:
    plan = planned(*ROOM, *(("roles.trainer.gpus=0",) if on == "cores" else ()))
    (part,) = (part for host in plan.hosts for part in host.components if part.name == "publication copies")
    ranks = sum(slot.kind == "trainer" for slot in plan.slots)
    # bfloat16, of all ranks but one.
    assert part.bytes == 2 * 8_190_735_360 * (ranks - 1) // ranks


def test_engines_hold_a_version_while_they_swap_to_it() -> None:
    (host,) = planned(*ROOM).hosts
    parts = {part.name: part.bytes for part in host.components}
    assert parts["servers' copies"] == 2 * PUBLISHED
    assert "broadcast memory" not in parts
    smaller = ("roles.trainer.tokens_per_micro_batch=8192", "roles.rollout.memory_fraction=0.6")
    plan = planned(*ROOM, *smaller, "publication.carrier=collective", "roles.trainer.gpus=1", "roles.rollout.gpus=1")
    assert memory(plan, "rollout/0")["broadcast memory"] == PUBLISHED
    assert memory(plan, "trainer/0")["published weights"] == PUBLISHED
    assert "published weights" not in memory(plan, "trainer/1")


def test_deltas_lie_on_the_trainers_node_and_come_to_others_in_a_process() -> None:
    folder, nodes, parts = FOLDER.parent / "h100x16_qwen3_30b_a3b", 'supervision.nodes.listen="127.0.0.1:0"', []
    for delta in ("false", "true"):
        plan = planned(nodes, f"publication.delta={delta}", folder=folder)
        parts.append([{part.name: part.bytes for part in host.components} for host in plan.hosts])
    (head, other), (head_with, other_with) = parts
    whole = 2 * read_shape(folder / "model").parameters
    # On the trainer's node without engines: those that lead to the committed one and one that is written, and two that
    # are still read from elsewhere.
    assert head_with["weight stage"] - head["weight stage"] == 2 * whole and "deltas as they come" not in head_with
    assert other_with == {**other, "deltas as they come": whole // 2}


def test_each_engine_on_the_trainers_node_has_deltas_in_memory_of_its_own() -> None:
    before, after = (
        {part.name: part.bytes for part in planned(*ROOM, f"publication.delta={delta}").hosts[0].components}
        for delta in ("false", "true")
    )
    assert after["deltas as they come"] == 2 * (PUBLISHED // 2) and "deltas as they come" not in before
