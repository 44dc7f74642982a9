"""What is refused before a run over several nodes starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_rt.cluster.nodes import checks
from relax_rt.cluster.nodes.checks import check_nodes, pinned_plans
from relax_rt.config.checks import check_listen
from relax_rt.config.schema import NodesTable, RunConfig, RunTable, SupervisionTable
from relax_rt.supervision.plan import RolePlan
from relax_rt.transport.rpc.errors import RelaxError


def config(listen: str = "", **queue: str) -> RunConfig:
    supervision = SupervisionTable(nodes=NodesTable(listen=listen))
    return RunConfig.model_validate({"run": RunTable(name="x"), "supervision": supervision, "queue": queue})


def plan(kind: str, **settings: object) -> RolePlan:
    from relax_rt.config.schema import RoleSettings

    made = RoleSettings.model_validate(settings)
    return RolePlan(kind=kind, target="", settings=made, tier=50, restart="permanent", significant=False)


@pytest.mark.parametrize(
    ("given", "roles", "says"),
    [
        (config(), [plan("reward", node="b")], 'roles.reward.node = "b": this run has one node only'),
        (config("10.0.0.1:7"), [plan("queue", node="b")], "the queue runs on the head"),
        (config("10.0.0.1:7"), [plan("trainer", node="b")], "checkpoints do not go between nodes"),
        (config("10.0.0.1:7"), [plan("evaluator", node="b")], "trainer, evaluator, env, gateway run on the head"),
        (config("0.0.0.0:7"), [], "must be one that these reach"),
        (config("nowhere"), [], "no host and port"),
        (config("10.0.0.1:7", durability="disk"), [plan("queue")], "would not outlive them"),
        (config(), [plan("reward", gpus=1)], "this machine has 0, and no other node can join"),
    ],
)
def test_what_cannot_be(given: RunConfig, roles: list[RolePlan], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "count_gpus", lambda: 0)
    with pytest.raises(RelaxError) as caught:
        check_nodes(given, roles)
    assert says in str(caught.value)


def test_what_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "count_gpus", lambda: 0)
    check_nodes(config(), [plan("reward")])
    check_nodes(
        config("10.0.0.1:7"),
        [plan("reward", node="b", gpus=8), plan("trainer", node="head"), plan("rollout", node="b")],
    )


def test_roles_that_share_files_stay_on_the_head_and_engines_need_not() -> None:
    plans = [plan("registry"), plan("trainer"), plan("rollout"), plan("reward"), plan("reference", node="b")]
    assert [p.settings.node for p in pinned_plans(plans, config("10.0.0.1:7"))] == ["head", "head", None, None, "b"]
    assert pinned_plans(plans, config()) == plans


def test_addresses() -> None:
    assert check_listen("10.0.0.1:7") == "tcp://10.0.0.1:7"
    assert check_listen("tcp://[fe80::1]:0") == "tcp://[fe80::1]:0"
    with pytest.raises(RelaxError, match="other nodes come by tcp"):
        check_listen(f"unix://{Path('/x')}")
