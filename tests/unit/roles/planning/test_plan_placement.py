"""Where slots are put: nothing is given out twice, sets stay within an NVLink group, pins hold."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.config.inventory import Inventory
from relax_rt.config.schema import RoleSettings
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.planning.placement import AGENT_CORES, PlacedSlot, check_gpus, place
from relax_rt.roles.rewards.settings import RewardSettings
from relax_rt.roles.rollout.engines.settings import RolloutSettings
from relax_rt.roles.training.backend.settings import CriticSettings, ReferenceSettings, TrainerSettings


def nodes(*gpus: int, cores: int = 64, linked: int = 8) -> Inventory:
    return Inventory.model_validate(
        {
            "gpu": {"g": {"memory_gib": 80, "nvlink_gb_s": 450}},
            "nodes": [
                {
                    "name": f"n{index}",
                    "address": f"10.0.0.{index}",
                    "cores": cores,
                    "memory_gib": 1000,
                    "gpu": "g",
                    "gpus": count,
                    "nvlink": [list(range(first, min(first + linked, count))) for first in range(0, count, linked)],
                }
                for index, count in enumerate(gpus)
            ],
        }
    )


def config(**roles: RoleSettings) -> RLConfig:
    tables: dict[str, Any] = {"registry": RoleSettings(), "queue": RoleSettings(), **roles}
    plain = RLConfig.model_validate(
        {
            "run": {"name": "r"},
            "model": {"path": "m"},
            "data": {"task": "chain_sum"},
            "reward": {"function": "f.py:f"},
        }
    )
    return plain.model_copy(update={"roles": tables})


def where(placed: list[PlacedSlot], kind: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(slot.node, slot.gpus) for slot in placed if slot.kind == kind]


def sglang(count: int, tensor: int = 1, **more: Any) -> RolloutSettings:
    return RolloutSettings(engine="sglang", count=count, tensor_parallel=tensor, **more)


def megatron(count: int, tensor: int = 1, **more: Any) -> TrainerSettings:
    return TrainerSettings(backend="megatron", count=count, tensor_parallel=tensor, **more)


def test_ranks_come_first_in_order_and_engines_after_them() -> None:
    placed, problems = place(config(trainer=megatron(4, 2), rollout=sglang(2, 2)), nodes(4, 4))
    assert problems == []
    assert where(placed, "trainer") == [("n0", (n,)) for n in range(4)]
    assert where(placed, "rollout") == [("n1", (0, 1)), ("n1", (2, 3))]
    assert where(placed, "registry") == [("n0", ())]


def test_larger_sets_go_first_when_the_usual_order_leaves_gaps() -> None:
    # In order the two ranks would split the first group, and the engine of four would find none.
    placed, problems = place(config(trainer=megatron(2), rollout=sglang(1, 4)), nodes(6, linked=4))
    assert problems == []
    assert where(placed, "rollout") == [("n0", (0, 1, 2, 3))]
    assert where(placed, "trainer") == [("n0", (4,)), ("n0", (5,))]


def test_pins_hold_and_unknown_nodes_are_reported() -> None:
    found = config(trainer=megatron(2, node="n1"), rollout=sglang(1), reward=RewardSettings(node="n1"))
    placed, problems = place(found, nodes(8, 8))
    assert problems == []
    assert where(placed, "trainer") == [("n1", (0,)), ("n1", (1,))]
    assert where(placed, "reward") == [("n1", ())]
    (problem,) = check_gpus(config(trainer=megatron(1, node="n7")), nodes(8))
    assert problem.path == ("roles", "trainer", "node") and "no node" in problem.message


def test_shares_of_a_gpu_are_packed() -> None:
    found = config(rollout=RolloutSettings(count=3, gpus=0.5), trainer=TrainerSettings(gpus=1))
    placed, problems = place(found, nodes(3))
    assert problems == []
    assert where(placed, "rollout") == [("n0", (1,)), ("n0", (1,)), ("n0", (2,))]


def test_replicas_within_an_engine_may_lie_in_different_groups() -> None:
    placed, problems = place(config(rollout=sglang(1, 2, data_parallel=2)), nodes(4, linked=2))
    assert problems == []
    assert where(placed, "rollout") == [("n0", (0, 1, 2, 3))]


def test_critic_and_reference_have_gpus_of_their_own() -> None:
    found = config(
        trainer=megatron(2),
        critic=CriticSettings(backend="megatron", count=2),
        reference=ReferenceSettings(backend="megatron"),
        rollout=sglang(1),
    )
    placed, problems = place(found, nodes(6))
    assert problems == []
    assert [slot.gpus[0] for slot in placed if slot.gpus] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("roles", "gpus", "linked", "path", "words"),
    [
        ({"trainer": megatron(8), "rollout": sglang(4)}, (8,), 8, "count", "needs 12 GPUs (trainer 8, rollout 4)"),
        ({"rollout": sglang(1, 4)}, (4,), 2, "tensor_parallel", "no NVLink group has more than 2"),
        ({"rollout": sglang(1, 2, data_parallel=4)}, (4, 4), 4, "count", "4 sets of 2 GPUs of one NVLink group"),
        ({"trainer": megatron(9, node="n0")}, (8, 8), 8, "count", "free are: n0 none"),
    ],
)
def test_what_finds_no_place(roles: Any, gpus: tuple[int, ...], linked: int, path: str, words: str) -> None:
    _, problems = place(config(**roles), nodes(*gpus, linked=linked))
    assert [problem.path[2] for problem in problems] == [path]
    assert words in problems[0].message


def test_too_few_cores_are_reported_of_the_node_with_the_role_that_takes_most() -> None:
    _, problems = place(config(rollout=sglang(2, threads=6), reward=RewardSettings(count=4)), nodes(2, cores=16))
    assert [problem.path for problem in problems] == [("roles", "rollout", "threads")]
    assert "n0 has 16 cores, and 19 are needed: agent 1, rollout 12" in problems[0].message


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ({"trainer": megatron(1, gpus=2)}, "one GPU at most"),
        ({"rollout": sglang(1, 2, gpus=4)}, "tensor_parallel x data_parallel = 2"),
        ({"rollout": RolloutSettings(gpus=2)}, "the embedded engine uses one GPU at most"),
        ({"reward": RewardSettings(gpus=1.5)}, "whole GPUs are given out"),
    ],
)
def test_numbers_of_gpus_that_cannot_be(roles: Any, words: str) -> None:
    (problem,) = check_gpus(config(**roles), nodes(8))
    assert words in problem.message


@st.composite
def runs(draw: st.DrawFn) -> tuple[RLConfig, Inventory]:
    tensor = draw(st.sampled_from((1, 2, 4, 8)))
    roles: dict[str, RoleSettings] = {
        "trainer": megatron(tensor * draw(st.integers(1, 4)), tensor),
        "rollout": draw(
            st.one_of(
                st.builds(
                    sglang,
                    st.integers(1, 6),
                    st.sampled_from((1, 2, 4, 8)),
                    data_parallel=st.sampled_from((1, 2)),
                    threads=st.integers(1, 8),
                ),
                st.builds(RolloutSettings, count=st.integers(1, 6), gpus=st.sampled_from((0, 0.25, 0.5, 1))),
            )
        ),
        "reward": RewardSettings(count=draw(st.integers(0, 6)), threads=draw(st.integers(1, 4))),
    }
    gpus = draw(st.lists(st.sampled_from((0, 2, 4, 8)), min_size=1, max_size=4))
    return config(**roles), nodes(*gpus, cores=draw(st.integers(4, 64)), linked=draw(st.sampled_from((2, 4, 8))))


@given(runs())
def test_nothing_is_over_committed_and_nothing_is_lost(run: tuple[RLConfig, Inventory]) -> None:
    config, inventory = run
    placed, problems = place(config, inventory)
    used: Counter[tuple[str, int]] = Counter()
    by_name = {node.name: node for node in inventory.nodes}
    for slot in placed:
        for gpu in slot.gpus:
            assert gpu < by_name[slot.node].gpus
            used[slot.node, gpu] += slot.share  # type: ignore[assignment]
    assert all(share <= 1 + 1e-6 for share in used.values())
    slots = [slot.slot for slot in placed]
    assert len(slots) == len(set(slots))
    if problems:
        return
    assert sorted(slots) == sorted(f"{k}/{n}" for k, table in config.roles.items() for n in range(table.count))
    for node in inventory.nodes:
        assert AGENT_CORES + sum(slot.cores for slot in placed if slot.node == node.name) <= node.cores
    _sets_stay_together(config, inventory, placed)


def _sets_stay_together(config: RLConfig, inventory: Inventory, placed: list[PlacedSlot]) -> None:
    by_name = {node.name: node for node in inventory.nodes}
    trainer = [slot for slot in placed if slot.kind == "trainer"]
    tensor = config.roles["trainer"].tensor_parallel
    sets = [
        [(slot.node, slot.gpus[0]) for slot in trainer[first : first + tensor]]
        for first in range(0, len(trainer), tensor)
    ]
    rollout = config.roles["rollout"]
    for slot in (slot for slot in placed if slot.kind == "rollout"):
        size = rollout.tensor_parallel
        sets += [[(slot.node, gpu) for gpu in slot.gpus[at : at + size]] for at in range(0, len(slot.gpus), size)]
    for members in sets:
        node, first = members[0]
        assert {name for name, _ in members} == {node}
        assert {gpu for _, gpu in members} <= by_name[node].nvlink_group(first)
