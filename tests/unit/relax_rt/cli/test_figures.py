"""Version, lag, staleness and depth of each slot, from what registry and metrics say."""

from __future__ import annotations

import json
from pathlib import Path

from relax_rt.cli.figures import Figures, figures_of, judge, newest
from relax_rt.interfaces.agent import RunStatus, SlotStatus
from relax_rt.interfaces.registry import Changes, Member
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.identity import Incarnation


def slot(name: str, epoch: int) -> SlotStatus:
    return SlotStatus(slot=name, kind=name.partition("/")[0], tier=1, state="ready", pid=1, epoch=epoch)


def status(run_dir: str = "/runs/two") -> RunStatus:
    slots = [slot("queue/0", 2), slot("rollout/0", 7), slot("rollout/1", 8), slot("trainer/0", 9)]
    return RunStatus(run_id="ab", name="two", run_dir=run_dir, status="running", slots=slots)


def version(number: int, parent: int, digest: str) -> VersionRecord:
    return VersionRecord(version=number, parent=parent, step=number, digest=digest)


def test_lag_is_the_distance_on_the_tree_and_not_a_difference_of_numbers() -> None:
    # Version 5 is a branch from 1 after a roll-back; 2 lies on the branch that was left.
    records = [version(1, 0, "a"), version(2, 1, "b"), version(5, 1, "c")]
    members = [
        Member(Incarnation("rollout/0", 7), policy_version=2),
        Member(Incarnation("rollout/1", 8), policy_version=1),
        Member(Incarnation("trainer/0", 9), state="gone", policy_version=5),
    ]
    found = judge(status(), Changes(1, True, members, records[-1]), records, {})
    assert found == {"rollout/0": Figures(2, 2), "rollout/1": Figures(1, 1)}


def test_depth_and_staleness_of_metrics_count_for_the_living_incarnation_only() -> None:
    metrics = [
        {"kind": "queue", "by": "queue/0#2", "outstanding": 3, "bound": 8.0},
        {"kind": "queue", "by": "queue/0#2", "outstanding": 4, "bound": float("inf")},
        {"kind": "rollout", "by": "rollout/0#6", "running": 9, "waiting": 9},
        {"kind": "rollout", "by": "rollout/1#8", "running": 2, "waiting": 3},
        {"kind": "step", "by": "trainer/0#9", "staleness": [0, 2, 1]},
        {"kind": "other", "by": "trainer/0#9"},
    ]
    found = judge(status(), None, [], newest(metrics))
    assert found == {
        "queue/0": Figures(depth=4),
        "rollout/1": Figures(depth=5),
        "trainer/0": Figures(staleness=2),
    }


def test_without_registry_and_metrics_there_are_no_figures(tmp_path: Path) -> None:
    assert figures_of(status(str(tmp_path))) == {}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "mine", "by": "rollout/0#7", "depth": 6}) + '\n{"torn')
    assert figures_of(status(str(tmp_path))) == {"rollout/0": Figures(depth=6)}
