"""The trainer's checkpoints that cannot be read, and its steps that are thrown away, with everything around it real."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from trainer_parts import EVERY, GROUPS, SOON_S, Lives, lives_of, model_with_tokenizer  # noqa: E402

from relax_rt.config.problems import BadInput  # noqa: E402
from relax_rt.roles.base.progress import NoProgress  # noqa: E402
from relax_rt.roles.training.checkpoints import store as checkpoint  # noqa: E402
from relax_rt.roles.training.checkpoints.store import read_state  # noqa: E402
from relax_rt.roles.training.publication.publisher import Publisher  # noqa: E402
from relax_rt.roles.training.torch.backend import TorchBackend  # noqa: E402
from relax_rt.roles.training.trainer import SKIPPED_IN_A_ROW, TrainerRole  # noqa: E402
from relax_rt.transport.base.versions import VersionRecord  # noqa: E402
from relax_rt.transport.rpc.errors import DeadlineExceeded, GivenUp, Refused, RelaxError  # noqa: E402


@pytest.fixture
async def lives(tmp_path: Path) -> AsyncIterator[Lives]:
    async with lives_of(tmp_path) as found:
        yield found


@pytest.fixture
def model(model_dir: Path, tmp_path: Path) -> Path:
    return model_with_tokenizer(model_dir, tmp_path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """The highest bit of the exponent of a number far behind; or a bit of text."""
    content = bytearray(path.read_bytes())
    content[-1 if path.suffix == ".safetensors" else len(content) // 2] ^= 0x40 if path.suffix == ".safetensors" else 1
    path.write_bytes(content)


MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer-00001-of-00001.safetensors", "relax_rt.json"


@pytest.mark.parametrize(
    ("part", "harm"),
    [
        *((part, harm) for part in (MODEL, OPTIMIZER, STATE) for harm in (truncate, flip)),
        (OPTIMIZER, Path.unlink),
        ("tokenizer.json", flip),
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
async def test_a_damaged_checkpoint_no_longer_counts(
    lives: Lives, model: Path, part: str, harm: Callable[[Path], None]
) -> None:
    await lives.life(model, steps=9, stop_after=4)
    assert lives.folders() == ["step-000002", "step-000004"]
    assert {MODEL, OPTIMIZER, "config.json", "tokenizer.json"} <= files_of(lives.checkpoints / "step-000004")
    harm(lives.checkpoints / "step-000004" / part)
    ctx = await lives.life(model, steps=9, stop_after=3)
    (said,) = ctx.told("checkpoint_damaged")
    assert said["checkpoint"] == "step-000004" and said["why"]
    assert part in said["why"] or part == STATE
    (aside,) = ctx.told("checkpoint_quarantined")
    assert aside["folder"] == "damaged-step-000004" and aside["why"]
    assert [one["step"] for one in ctx.told("resumed")] == [2]
    assert any("step 3 of 9 is done (skipped" in detail and "step-000004" in detail for detail in ctx.progress.details)
    assert any("asked to stop: finishing the step" in detail for detail in ctx.progress.details)
    # Asked to stop at step 3, it leaves a checkpoint of it, though a damaged one was of a later step.
    assert lives.folders() == ["damaged-step-000004", "step-000002", "step-000003"]
    ctx = await lives.life(model, steps=6)
    assert ctx.told("resumed")[0]["step"] == 3 and not ctx.told("checkpoint_damaged")
    assert lives.folders() == ["damaged-step-000004", "step-000004", "step-000006"]
    assert read_state(lives.checkpoints / "step-000004").epoch == ctx.who.epoch


def files_of(folder: Path) -> set[str]:
    """Files that a checkpoint has digests of: all but the one that says so."""
    files = set(read_state(folder).files)
    assert files == {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {STATE}
    return files


def without_digests(folder: Path) -> None:
    """As an earlier version wrote it."""
    said = json.loads((folder / STATE).read_bytes())
    lacking = ("files", "own")
    (folder / STATE).write_text(json.dumps({name: value for name, value in said.items() if name not in lacking}))


async def test_a_checkpoint_of_another_run_of_the_model_ends_the_run_and_stays(model: Path, tmp_path: Path) -> None:
    for name, rate in (("one", 1e-3), ("other", 2e-3)):
        (tmp_path / name).mkdir()
        async with lives_of(tmp_path / name) as lives:
            await lives.life(model, steps=9, stop_after=4, learning_rate=rate)
            if name == "one":
                continue
            other = lives.checkpoints / "step-000004"
            shutil.rmtree(other)
            shutil.copytree(tmp_path / "one" / "run" / "checkpoints" / "step-000004", other)
            with pytest.raises(BadInput, match=r"step-000004.*another run: its policy version 5 of digest"):
                await lives.life(model, steps=9)
            assert lives.folders() == ["step-000002", "step-000004"] and not lives.contexts[-1].records
            assert not lives.contexts[-1].told("checkpoint_damaged")
            # As it says.
            shutil.rmtree(other)
            assert (await lives.life(model, steps=3)).told("resumed")[0]["step"] == 2


async def test_where_none_can_be_read_the_run_ends_and_nothing_is_touched(lives: Lives, model: Path) -> None:
    await lives.life(model, steps=9, stop_after=4)
    for name in ("step-000002", "step-000004"):
        truncate(lives.checkpoints / name / "model.safetensors")
    with pytest.raises(BadInput, match="none of the checkpoints") as caught:
        await lives.life(model, steps=9)
    assert "step-000002: " in caught.value.why and "step-000004: " in caught.value.why
    assert str(lives.checkpoints) in caught.value.hint and "step 0" in caught.value.hint
    assert lives.folders() == ["step-000002", "step-000004"]
    assert not lives.contexts[-1].told("checkpoint_quarantined") and not lives.contexts[-1].records


@pytest.mark.parametrize("of", [(checkpoint, "read_state"), (TorchBackend, "restore")], ids=["state", "weights"])
async def test_a_file_system_that_fails_for_a_moment_costs_no_checkpoint(
    lives: Lives, model: Path, of: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await lives.life(model, steps=9, stop_after=4)
    real = getattr(*of)

    def stale(*what: Any) -> Any:
        if what[-1].name == "step-000004":
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(*what)

    with monkeypatch.context() as patched:
        patched.setattr(*of, stale)
        with pytest.raises((RelaxError, OSError), match="Stale file handle") as caught:
            await lives.life(model, steps=9)
    assert not isinstance(caught.value, BadInput) and lives.folders() == ["step-000002", "step-000004"]
    ctx = await lives.life(model, steps=5)
    assert ctx.told("resumed")[0]["step"] == 4


async def test_nothing_of_a_checkpoint_that_the_critic_refuses_stays(lives: Lives, model: Path) -> None:
    filters: dict[str, Any] = {"filters": ["zero_variance"]}
    await lives.life(model, steps=9, stop_after=4, **filters)
    known = {name: json.loads((lives.checkpoints / name / "sampling.json").read_text()) for name in lives.folders()}
    assert [one["history"]["items"]["i"][0] for one in known.values()] == [2 * GROUPS, 4 * GROUPS]
    (lives.checkpoints / "step-000002" / "sampling.json").unlink()
    without_digests(lives.checkpoints / "step-000002")
    seen: list[int] = []

    class Critic:
        async def begin(self, step: int, folder: Path) -> None:
            if step == 4:
                raise Refused(f"critic of {folder.name}", why="its file is torn")

    def with_critic(role: TrainerRole) -> None:
        role.checkpoints.critic, restore = Critic(), role.checkpoints.restore  # type: ignore[assignment]

        async def restored() -> Any:
            found = await restore()
            assert role._group_filter is not None
            seen.append(role._group_filter.history.outcomes("i").groups)
            role.checkpoints.critic = None
            return found

        role.checkpoints.restore = restored  # type: ignore[method-assign]

    ctx = await lives.life(model, steps=9, stop_after=3, harm=with_critic, **filters)
    assert ctx.told("resumed")[0]["step"] == 2 and seen == [0]


async def test_what_was_set_aside_is_no_reason_to_begin_at_step_0(lives: Lives, model: Path) -> None:
    await lives.life(model, steps=9, stop_after=2)
    (lives.checkpoints / "step-000002").rename(lives.checkpoints / "damaged-step-000002")
    with pytest.raises(BadInput, match="quarantined before: damaged-step-000002"):
        await lives.life(model, steps=9)


async def test_checkpoints_of_another_model_end_the_run_and_stay(lives: Lives, model: Path) -> None:
    await lives.life(model, steps=9, stop_after=2)
    config = transformers.AutoConfig.from_pretrained(model)
    config.intermediate_size *= 2
    other = lives.home / "other"
    transformers.Qwen3ForCausalLM(config).save_pretrained(other)
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match=r"step-000002.*another config.json and another set of weights") as caught:
        await lives.life(other, steps=9)
    assert "model.path" in caught.value.hint and lives.folders() == ["step-000002"]
    # A checkpoint that does not say what it is of is held against the model by the shapes alone.
    path = lives.checkpoints / "step-000002" / "relax_rt.json"
    said = path.read_bytes()
    kept = {name: value for name, value in json.loads(said).items() if name not in ("model", "own")}
    path.write_text(json.dumps(kept))
    with pytest.raises(BadInput, match=r"step-000002.*shape"):
        await lives.life(other, steps=9)
    path.write_bytes(said)
    ctx = await lives.life(model, steps=3)
    assert ctx.told("resumed")[0]["step"] == 2 and lives.folders() == ["step-000002", "step-000003"]


async def test_other_weights_of_the_same_shapes_are_another_model(lives: Lives, model: Path) -> None:
    await lives.life(model, steps=9, stop_after=2)
    other = lives.home / "other"
    shutil.copytree(model, other)
    torch.manual_seed(1)
    transformers.Qwen3ForCausalLM(transformers.AutoConfig.from_pretrained(model)).save_pretrained(other)
    with pytest.raises(BadInput, match=r"step-000002.*of another model"):
        await lives.life(other, steps=9)
    assert lives.folders() == ["step-000002"] and not lives.contexts[-1].told("checkpoint_damaged")


async def test_a_finished_training_goes_on_to_more_steps(lives: Lives, model: Path) -> None:
    rates = {"learning_rate_schedule": "linear"}
    first = await lives.life(model, steps=3, **rates)
    more = await lives.life(model, steps=5, **rates)
    assert more.told("resumed")[0]["step"] == 3 and more.told("training_finished") == [{"step": 5, "target": 5}]
    steps = [record for ctx in (first, more) for record in ctx.records if record["kind"] == "step"]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5]
    # Each life's curve is that of its own number of steps.
    assert [record["learning_rate"] for record in steps] == pytest.approx(
        [1e-3, 1e-3 * 2 / 3, 1e-3 / 3, 1e-3 * 2 / 5, 1e-3 / 5]
    )
    # There already, or beyond: there is nothing to do.
    for steps_now in (5, 4):
        again = await lives.life(model, steps=steps_now, **rates)
        assert again.told("training_finished") == [{"step": 5, "target": steps_now}]
        assert not [record for record in again.records if record["kind"] == "step"]
    assert lives.folders()[-1] == "step-000005"


async def test_what_was_trained_before_all_groups_fail_is_written_once(lives: Lives, model: Path) -> None:
    def barren(role: TrainerRole) -> None:
        real, write = role.collector.collect, role.backend.write

        async def collect(step: int) -> Any:
            if step > 2:
                raise NoProgress("64 groups failed in a row")
            return await real(step)

        def slow(folder: Path) -> None:
            time.sleep(0.5)
            write(folder)

        role.collector.collect, role.backend.write = collect, slow  # type: ignore[method-assign]

    with pytest.raises(NoProgress):
        await lives.life(model, steps=9, harm=barren)
    assert [one["step"] for one in lives.contexts[-1].told("checkpoint")] == [2]
    assert lives.folders() == ["step-000002"]


async def test_steps_are_on_the_queues_disk_before_a_checkpoint_of_them_is_there(
    lives: Lives, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, forced, found = lives.world.broker._journal, [0], list[tuple[int, int]]()
    for task in lives.world.broker._tasks:
        if "_keep_disk" in repr(task.get_coro()):
            # Only what is asked for outlives the host.
            task.cancel()
    sync, rename = journal.sync, Path.rename

    def noted() -> None:
        n = journal.n
        sync()
        forced[0] = n

    def renamed(self: Path, target: Path) -> Path:
        if target.name.startswith("step-"):
            found.append((int(target.name[5:]), forced[0]))
        return rename(self, target)

    told: dict[int, int] = {}

    def watch(role: TrainerRole) -> None:
        trained = role.queue.complete_step

        async def noting(leases: Any, step: int, *what: Any, **more: Any) -> Any:
            answer = await trained(leases, step, *what, **more)
            told[step] = journal.n
            return answer

        role.queue.complete_step = noting  # type: ignore[method-assign]

    monkeypatch.setattr(journal, "sync", noted)
    monkeypatch.setattr(Path, "rename", renamed)
    await lives.life(model, steps=4, harm=watch)
    assert [step for step, _ in found] == [2, 4]
    assert all(on_disk >= told[step] for step, on_disk in found), (found, told)


async def test_a_checkpoint_of_steps_that_the_queue_has_lost_ends_the_run_with_what_to_do(
    tmp_path: Path, model: Path
) -> None:
    async with lives_of(tmp_path) as lives:
        await lives.life(model, steps=9, stop_after=2)
        before = (tmp_path / "queue" / "segment-1.log").read_bytes()
        await lives.life(model, steps=9, stop_after=2 + 2)
    assert lives.folders() == ["step-000002", "step-000004"]
    # Its host went down, and the last part of the journal was never forced to disk.
    for path in (tmp_path / "queue").iterdir():
        path.unlink() if path.is_file() else shutil.rmtree(path)
    (tmp_path / "queue" / "segment-1.log").write_bytes(before)
    shutil.rmtree(tmp_path / "shm")
    async with lives_of(tmp_path, memory="anew") as lives:
        with pytest.raises(GivenUp, match=r"step-000004 of step 4: the queue knows of no step after 2") as caught:
            await lives.life(model, steps=9)
        assert str(lives.checkpoints) in caught.value.hint and "step-000004" in caught.value.hint
        shutil.rmtree(lives.checkpoints / "step-000004")
        ctx = await lives.life(model, steps=4)
        assert ctx.told("resumed")[0]["step"] == 2
        assert (await lives.world.account())["freed"] == 4 * GROUPS * 2


def spoil(*steps: int) -> Callable[[TrainerRole], None]:
    """Weights that are no numbers while the gradients of these steps are computed."""

    def harm(role: TrainerRole) -> None:
        backend: Any = role.backend
        accumulate = backend.accumulate

        def spoilt(samples: Any) -> Any:
            if role.step + 1 not in steps:
                return accumulate(samples)
            parameter = next(backend._model.parameters())
            kept = parameter.detach().clone()
            parameter.data.fill_(float("nan"))
            try:
                return accumulate(samples)
            finally:
                parameter.data.copy_(kept)

        backend.accumulate = spoilt

    return harm


async def test_what_it_says_that_it_does_is_of_the_step_that_it_makes(lives: Lives, model: Path) -> None:
    ctx = await lives.life(model, steps=2)
    said = [detail for detail in ctx.progress.details if detail.startswith("step")]
    assert said == [
        "step 1 of 2: its groups are gathered",
        "step 1 of 2: computing",
        "step 1 of 2 is done",
        "step 2 of 2: computing",
        "step 2 of 2 is done",
    ]


async def test_a_step_that_is_not_finite_is_thrown_away_and_counted(lives: Lives, model: Path) -> None:
    ctx = await lives.life(model, steps=5, harm=spoil(2, 3))
    assert [one["step"] for one in ctx.told("step_skipped")] == [2, 3]
    assert all("nan" in one["why"] for one in ctx.told("step_skipped"))
    records = [record for record in ctx.records if record["kind"] == "step"]
    assert [bool(record["skipped"]) for record in records] == [False, True, True, False, False]
    assert (await lives.world.account())["skipped"] == 2 * GROUPS * 2
    versions = {record.version: record for record in await lives.registry.versions()}
    unchanged = [versions[record["version"]].changed for record in records]
    assert unchanged == [True, False, False, True, True]
    state = json.loads((lives.checkpoints / "step-000005" / "relax_rt.json").read_text())
    assert state["step"] == 5 and torch.isfinite(next(iter(weights_of(lives.checkpoints / "step-000005")))).all()


def weights_of(folder: Path) -> list[Any]:
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").values())


async def test_the_last_checkpoint_says_that_it_waits_for_its_version(lives: Lives, model: Path) -> None:
    waits: list[str] = []

    def slow(role: TrainerRole) -> None:
        real = role.backend.export

        def export(*what: Any, **more: Any) -> None:
            if role.step == 4:
                time.sleep(1.0)
            real(*what, **more)

        role.backend.export = export  # type: ignore[method-assign]
        role.ctx.progress.waiting = waits.append  # type: ignore[method-assign, assignment]

    ctx = await lives.life(model, steps=4, harm=slow)
    last = ctx.told("published")[-1]["version"]
    assert f"the publication before: version {last} is staged" in waits and waits[-1] == ""
    assert lives.folders()[-1] == "step-000004"


def nothing_to_train(*steps: int) -> Callable[[TrainerRole], None]:
    """None of the tokens of these steps is trained, as if every completion had been cut and masked."""

    def harm(role: TrainerRole) -> None:
        real = role.collector.collect

        async def collect(step: int) -> Any:
            batch = await real(step)
            if batch is not None and step in steps:
                batch.samples = [
                    msgspec.structs.replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
                    for sample in batch.samples
                ]
            return batch

        role.collector.collect = collect  # type: ignore[method-assign]

    return harm


async def test_a_step_with_nothing_to_train_publishes_nothing_and_three_in_a_row_are_reported(
    lives: Lives, model: Path
) -> None:
    ctx = await lives.life(model, steps=9, stop_after=7, harm=nothing_to_train(2, 4, 5, 6))
    assert [one["step"] for one in ctx.told("step_empty")] == [2, 4, 5, 6]
    assert [(one["step"], one["steps"]) for one in ctx.told("steps_empty")] == [(6, 3)]
    assert "sampling.max_new_tokens = 8" in ctx.told("steps_empty")[0]["why"]
    records = [record for record in ctx.records if record["kind"] == "step"]
    versions = [record["version"] for record in records]
    assert versions[1] == versions[0] and versions[2:6] == [versions[2]] * 4 and len(set(versions)) == 3
    assert {record.version for record in await lives.registry.versions()} >= set(versions)
    assert (await lives.world.account())["skipped"] == 4 * GROUPS * 2
    # A checkpoint of such a step is of the version before, and is gone on from.
    assert "step-000006" in lives.folders()
    ctx = await lives.life(model, steps=8)
    assert ctx.told("resumed")[0]["step"] == 7


def equal_rewards(*steps: int) -> Callable[[TrainerRole], None]:
    """All rewards of these steps are 0.25."""

    def harm(role: TrainerRole) -> None:
        real = role.collector.collect

        async def collect(step: int) -> Any:
            batch = await real(step)
            if batch is not None and step in steps:
                batch.samples = [msgspec.structs.replace(sample, reward=0.25) for sample in batch.samples]
            return batch

        role.collector.collect = collect  # type: ignore[method-assign]

    return harm


async def test_steps_without_an_advantage_are_reported_and_trained_on(lives: Lives, model: Path) -> None:
    ctx = await lives.life(model, steps=9, stop_after=9, harm=equal_rewards(2, 3, 5, 6, 7))
    (told,) = ctx.told("steps_empty")
    assert (told["step"], told["steps"]) == (7, 3) and not ctx.told("step_empty")
    assert told["why"].startswith("rewards are equal within each group, mean reward 0.25; what helps: ")
    assert 'algorithm.filters = ["zero_variance"]' in told["why"] and "algorithm.group_size = 2" in told["why"]
    records = [record for record in ctx.records if record["kind"] == "step"]
    assert [record["empty_steps"] for record in records] == [0, 1, 2, 0, 1, 2, 3, 0, 0]
    assert [record["step"] for record in records if record["empty_reason"]] == [7]
    # Such a step is published like any other, and its samples count as trained.
    assert len({record["version"] for record in records}) == 9
    assert "skipped" not in await lives.world.account()


@pytest.mark.parametrize("term", ["kl", "entropy"])
async def test_steps_that_train_a_term_of_the_loss_are_not_reported_as_empty(
    lives: Lives, model: Path, term: str
) -> None:
    """The rewards are equal, but KL or entropy moves the weights."""

    def harm(role: TrainerRole) -> None:
        equal_rewards(*range(1, 9))(role)
        collect = role.collector.collect

        async def with_reference(step: int) -> Any:
            batch = await collect(step)
            for sample in batch.samples if batch is not None else []:
                sample.reference_logprobs = sample.behaviour_logprobs - np.float32(0.5)
            return batch

        role.collector.collect = with_reference  # type: ignore[method-assign]

    part = {"name": "k3" if term == "kl" else "bonus", "coefficient": 0.5}
    ctx = await lives.life(model, steps=20, stop_after=4, harm=harm, **{term: part})
    records = [record for record in ctx.records if record["kind"] == "step"]
    assert all(record["grad_norm"] > 0 for record in records) and not ctx.told("steps_empty")
    assert [record["empty_steps"] for record in records] == [0] * 4


async def test_steps_whose_advantages_the_loss_sets_to_0_are_reported(lives: Lives, model: Path) -> None:
    def harm(role: TrainerRole) -> None:
        collect = role.collector.collect

        async def far_off(step: int) -> Any:
            batch = await collect(step)
            for sample in batch.samples if batch is not None else []:
                # Its token was likelier in the policy that sampled it if it was punished, else less likely.
                sample.behaviour_logprobs = np.full_like(sample.behaviour_logprobs, -50.0 * (sample.reward or 0.0))
            return batch

        role.collector.collect = far_off  # type: ignore[method-assign]

    loss = {"name": "m2po", "threshold": 1e-9}
    ctx = await lives.life(model, steps=20, stop_after=3, harm=harm, loss=loss)
    (told,) = ctx.told("steps_empty")
    assert "the loss set the advantages of all " in told["why"] and "algorithm.max_staleness" in told["why"]


async def test_a_step_that_was_thrown_away_leaves_the_count_of_empty_steps_as_it_is(lives: Lives, model: Path) -> None:
    def harm(role: TrainerRole) -> None:
        equal_rewards(2, 3, 5)(role)
        spoil(4, 7)(role)

    ctx = await lives.life(model, steps=20, stop_after=7, harm=harm)
    assert [one["step"] for one in ctx.told("step_skipped")] == [4, 7]
    assert [(one["step"], one["steps"]) for one in ctx.told("steps_empty")] == [(5, 3)]
    records = [record for record in ctx.records if record["kind"] == "step"]
    assert [record["empty_steps"] for record in records] == [0, 1, 2, 2, 3, 0, 0]


async def test_a_long_row_of_empty_steps_is_reported_when_its_length_has_doubled(lives: Lives, model: Path) -> None:
    ctx = await lives.life(model, steps=20, stop_after=10, harm=equal_rewards(*range(1, 21)))
    assert [one["steps"] for one in ctx.told("steps_empty")] == [3, 6]


async def test_the_last_step_is_published_whatever_is_in_it(lives: Lives, model: Path) -> None:
    """The other roles know the end of the run by its version."""
    ctx = await lives.life(model, steps=3, harm=nothing_to_train(2, 3))
    versions = await lives.registry.versions()
    assert [(record.step, record.changed) for record in versions][-2:] == [(1, True), (3, False)]
    assert lives.folders()[-1] == "step-000003" and ctx.told("training_finished")


async def test_too_many_in_a_row_end_the_trainer(lives: Lives, model: Path) -> None:
    spoilt = range(3, 3 + SKIPPED_IN_A_ROW)
    with pytest.raises(GivenUp, match=f"{SKIPPED_IN_A_ROW} steps in a row were skipped: loss is nan") as caught:
        await lives.life(model, steps=20, harm=spoil(*spoilt))
    assert "learning rate" in caught.value.hint
    assert [one["step"] for one in lives.contexts[-1].told("step_skipped")] == list(spoilt)


async def test_a_failed_trainer_does_not_wait_for_the_checkpoint_of_a_version_that_never_comes(
    lives: Lives, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Publisher._publish

    async def hang(self: Publisher, weights: VersionRecord) -> VersionRecord:
        if weights.step != EVERY:
            return await publish(self, weights)
        self._copied.set()
        self._started_at -= self._limit_s
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(Publisher, "_publish", hang)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(DeadlineExceeded, match="the publication was not through"):
            await lives.life(model, steps=9)
    assert lives.folders() == []
