"""What a plan refuses: sizes that do not divide, GPUs and hosts that are too small, caches that hold no sample."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_rt.cli.main import main
from relax_rt.config.inventory import Inventory, load_inventory
from relax_rt.config.loader import load_config
from relax_rt.config.problems import ConfigErrors
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.planning.plan import HardwarePlan, plan_on

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"
DENSE, EXPERTS = EXAMPLES / "h100x8_qwen3_8b", EXAMPLES / "h100x16_qwen3_30b_a3b"
TRAINER, ROLLOUT = "roles.trainer", "roles.rollout"


def inventory(folder: Path, **changes: object) -> Inventory:
    found = load_inventory(folder / "nodes.toml")
    nodes = [node.model_copy(update=changes) for node in found.nodes]
    return found.model_copy(update={"nodes": nodes})


def outcome(folder: Path, *overrides: str, nodes: Inventory | None = None) -> HardwarePlan:
    nodes = nodes or inventory(folder)
    config = load_config(folder / "roles.toml", overrides, inventory=nodes)
    assert isinstance(config, RLConfig)
    found = plan_on(config, nodes)
    assert isinstance(found, HardwarePlan)
    return found


def refused(folder: Path, *overrides: str, nodes: Inventory | None = None) -> dict[str, str]:
    """What is wrong, by dotted key."""
    with pytest.raises(ConfigErrors) as caught:
        outcome(folder, *overrides, nodes=nodes)
    found: dict[str, str] = {}
    for p in caught.value.problems:
        key = ".".join(map(str, p.path))
        found[key] = found.get(key, "") + f"{p.message} = {p.hint}\n"
    return found


@pytest.mark.parametrize(
    ("folder", "override", "key", "words"),
    [
        (DENSE, f"{TRAINER}.count=5", f"{TRAINER}.count", "5 ranks do not divide into replicas of the model"),
        (DENSE, f"{TRAINER}.tensor_parallel=3", f"{TRAINER}.tensor_parallel", "3 does not divide the model's"),
        (DENSE, f"{TRAINER}.pipeline_parallel=5", f"{TRAINER}.pipeline_parallel", "5 does not divide the model's 36"),
        (DENSE, f"{TRAINER}.expert_parallel=2", f"{TRAINER}.expert_parallel", "the model has no experts"),
        (EXPERTS, f"{TRAINER}.expert_parallel=3", f"{TRAINER}.expert_parallel", "3 does not divide the model's 128"),
        (EXPERTS, f"{TRAINER}.sequence_parallel=false", f"{TRAINER}.sequence_parallel", "deal out every token"),
        (EXPERTS, f"{ROLLOUT}.expert_parallel=3", f"{ROLLOUT}.expert_parallel", "does not divide tensor_parallel = 4"),
        (EXPERTS, f"{ROLLOUT}.tensor_parallel=6", f"{ROLLOUT}.tensor_parallel", "6 does not divide the model's 32"),
        (DENSE, f"{ROLLOUT}.engine=embedded", f"{ROLLOUT}.tensor_parallel", "the embedded engine uses one GPU"),
        (DENSE, f"{TRAINER}.backend=torch", f"{TRAINER}.tensor_parallel", "the torch backend divides"),
        (DENSE, "sampling.max_new_tokens=40000", "sampling.max_new_tokens", "the model's context is 40960"),
        (DENSE, f"{TRAINER}.tokens_per_micro_batch=32768", f"{TRAINER}.tokens_per_micro_batch", "lower tokens_per"),
        (DENSE, f"{ROLLOUT}.memory_fraction=0.2", f"{ROLLOUT}.memory_fraction", "a KV cache of 4,"),
        (DENSE, f"{ROLLOUT}.memory_fraction=0.1", f"{ROLLOUT}.memory_fraction", "does not even hold the weights"),
        (DENSE, f"{ROLLOUT}.count=4", "roles.evaluator.count", "needs 9 GPUs (trainer 4, rollout 4, evaluator 1)"),
        (DENSE, "model.path=elsewhere", "model.path", "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_at_its_key(folder: Path, override: str, key: str, words: str) -> None:
    extra = (f"{ROLLOUT}.tensor_parallel=2",) if "embedded" in override else ()
    found = refused(folder, override, *extra)
    assert words in found[key]


def test_all_reasons_come_at_once() -> None:
    found = refused(
        EXPERTS,
        f"{TRAINER}.optimizer_dtype=float32",
        f"{ROLLOUT}.memory_fraction=0.98",
        "roles.reward.threads=40",
        "sampling.max_new_tokens=40000",
        "roles.reference.backend=megatron",
        "roles.reference.tensor_parallel=3",
    )
    assert set(found) == {
        f"{TRAINER}.count",
        f"{ROLLOUT}.memory_fraction",
        f"{ROLLOUT}.count",
        "roles.reward.threads",
        "sampling.max_new_tokens",
        "queue.capacity_mib",
        "roles.reference.count",
        "roles.reference.tensor_parallel",
    }
    assert "GPU" in found[f"{ROLLOUT}.memory_fraction"]


def test_the_caret_stands_at_the_value_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "roles.toml"
    (tmp_path / "model").symlink_to(EXPERTS / "model")
    path.write_text((EXPERTS / "roles.toml").read_text().replace("pipeline_parallel = 2", "pipeline_parallel = 5"))
    with pytest.raises(ConfigErrors) as caught:
        load_config(path, inventory=inventory(EXPERTS))
    problem = next(p for p in caught.value.problems if p.path[-1] == "pipeline_parallel")
    assert problem.place is not None
    assert (problem.place.text, problem.place.column) == ("pipeline_parallel = 5", len("pipeline_parallel = ") + 1)
    assert problem.hint == "use one of: 1, 2, 3, 4, 6, 8, 12, 16, …"


def test_a_host_that_is_too_small() -> None:
    found = refused(DENSE, nodes=inventory(DENSE, memory_gib=100.0))
    assert "node node-0: 276.7 GiB of memory are needed and 100.0 GiB there" in found["roles"]
    assert "/dev/shm has 50.0 GiB" in found["queue.capacity_mib"]


def test_too_few_ports() -> None:
    nodes = inventory(DENSE)
    nodes = nodes.model_copy(update={"ports": nodes.ports.model_copy(update={"last": nodes.ports.first + 3})})
    assert "14 ports are needed on node-0, and the inventory's [ports] has 4" in refused(DENSE, nodes=nodes)["roles"]


def test_reference_and_critic_are_planned_where_they_are_named() -> None:
    small = ("roles.evaluator.count=0", "evaluation.every_steps=0", f"{ROLLOUT}.count=1")
    found = outcome(
        DENSE,
        *small,
        f"{TRAINER}.count=2",
        f"{TRAINER}.optimizer_dtype=bfloat16",
        f"{TRAINER}.gradient_dtype=bfloat16",
        f"{TRAINER}.tokens_per_micro_batch=8192",
        "roles.critic.backend=megatron",
        "roles.critic.count=4",
        "roles.critic.tensor_parallel=4",
        "roles.critic.recompute=full",
        "roles.reference.backend=megatron",
    )
    memory = {share.slot: {p.name: p.bytes for p in share.components} for gpu in found.gpus for share in gpu.shares}
    assert "logits" not in memory["critic/0"]
    assert {"gradients", "optimizer"}.isdisjoint(memory["reference/0"])
    assert memory["reference/0"]["weights"] == 2 * 8_190_735_360
    assert [gang.kind for gang in found.gangs] == ["trainer", "critic", "reference"]


def test_an_update_has_a_sample_for_each_replica() -> None:
    few = (f"{TRAINER}.tensor_parallel=1", "algorithm.group_size=2")
    found = refused(DENSE, *few, "algorithm.prompts_per_step=1")
    assert "a step has 2 samples for 4 data-parallel replicas" in found["algorithm.prompts_per_step"]
    found = refused(DENSE, *few, "algorithm.prompts_per_step=4", "algorithm.updates_per_step=4")
    assert "an update has 2 samples for 4 data-parallel replicas" in found["algorithm.prompts_per_step"]


def test_replicas_within_an_engine_load_from_files() -> None:
    found = outcome(
        EXPERTS, f"{ROLLOUT}.tensor_parallel=2", f"{ROLLOUT}.data_parallel=2", f"{ROLLOUT}.expert_parallel=1"
    )
    assert not [communicator for communicator in found.communicators if communicator.kind == "weights"]
    assert [figure.name for figure in found.figures if "loaded" in figure.name] == ["loaded by rollout"]


def test_a_run_on_cores_is_planned_too() -> None:
    found = outcome(
        DENSE,
        f"{TRAINER}.backend=torch",
        f"{TRAINER}.tensor_parallel=1",
        f"{TRAINER}.count=1",
        f"{TRAINER}.recompute=none",
        f"{ROLLOUT}.engine=embedded",
        "roles.evaluator.engine=embedded",
    )
    assert found.gpus == [] and found.communicators == []
    (host,) = found.hosts
    assert any(part.name == "models on cores" for part in host.components)
    assert "unused  GPU 0-7" in found.render()


def test_a_plan_needs_neither_the_interpreter_nor_the_folder_of_the_run() -> None:
    python, folder = f"{ROLLOUT}.python=/opt/elsewhere/bin/python", f"run.dir={DENSE / 'README.md'}/run"
    outcome(DENSE, python, folder)
    with pytest.raises(ConfigErrors) as caught:
        load_config(DENSE / "roles.toml", (python, folder))
    assert {p.path[-1] for p in caught.value.problems} >= {"python", "dir"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((f"{TRAINER}.lora.rank=8",), "adapters are trained by the torch backend alone"),
        ((f"{TRAINER}.backend=torch", f"{TRAINER}.tensor_parallel=1"), "recompute has no effect with backend"),
        ((f"{TRAINER}.optimizer_dtype=bfloat16",), "optimizer_dtype = bfloat16: moments of other types than float32"),
        ((f"{TRAINER}.attention=unfused",), "attention = unfused: packed sequences have fused attention alone"),
        (("roles.reference.count=1",), "nothing in [algorithm] needs the log-probabilities of a reference"),
        (("roles.critic.count=1",), "nothing in [algorithm] needs the values of a critic"),
        ((f"{ROLLOUT}.engine=embedded", f"{ROLLOUT}.memory_fraction=0.5"), "memory_fraction has no effect with engine"),
    ],
)
def test_what_is_only_planned_is_refused_by_validate(
    capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], words: str
) -> None:
    sets = [token for override in overrides for token in ("--set", override)]
    assert main(["validate", str(DENSE / "roles.toml"), *sets]) == 2
    assert words in capsys.readouterr().err


def test_problems_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = ["--inventory", str(DENSE / "nodes.toml")]
    assert main(["plan", str(DENSE / "roles.toml"), *nodes, "--json", "--set", f"{TRAINER}.count=5"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["problems"][0]["path"] == ["roles", "trainer", "count"]
    assert found["problems"][0]["place"]["column"] == len(f"{TRAINER}.count=") + 1


def test_problems_of_an_inventory_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = tmp_path / "nodes.toml"
    nodes.write_text("[[node]]\n")
    assert main(["plan", str(DENSE / "roles.toml"), "--inventory", str(nodes), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False and found["problems"]
