"""The phase itself, with a real backend: what it learns, what an end in the middle changes, and what it skips."""

from __future__ import annotations

import asyncio
import errno
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sft_parts import FakeContext, config_of, write_rows

torch = pytest.importorskip("torch")

from relax_rt.config.problems import BadInput  # noqa: E402
from relax_rt.roles.config.sections import RLConfig  # noqa: E402
from relax_rt.roles.training.algorithms.objective import Objective  # noqa: E402
from relax_rt.roles.training.checkpoints import store as checkpoint  # noqa: E402
from relax_rt.roles.training.checkpoints.cold_start import (  # noqa: E402
    cold_start_folder,
    cold_start_weights,
    read_progress,
    read_reference_logprobs,
    write_reference_logprobs,
)
from relax_rt.roles.training.checkpoints.digests import ModelIdentity  # noqa: E402
from relax_rt.roles.training.sft import phase  # noqa: E402
from relax_rt.roles.training.sft.phase import SKIPPED_IN_A_ROW, ColdStartPhase, preference_loss  # noqa: E402
from relax_rt.roles.training.torch.backend import TorchBackend  # noqa: E402
from relax_rt.transport.rpc.errors import GivenUp, RelaxError  # noqa: E402

SFT = (
    "cold_start.answers=true",
    "cold_start.steps=6",
    "cold_start.batch=4",
    "cold_start.checkpoint_every=2",
    "cold_start.validate_every=3",
    "cold_start.validation_items=4",
    "cold_start.learning_rate=3e-3",
)


def backend_of(config: RLConfig, home: Path) -> TorchBackend:
    return TorchBackend(
        home / "model",
        config.algorithm,
        dtype="float32",
        threads=1,
        tokens_per_micro_batch=256,
        temperature=config.sampling.temperature,
        on_progress=lambda _: None,
    )


def weights(backend: TorchBackend) -> dict[str, Any]:
    return {name: p.detach().clone() for name, p in backend._model.named_parameters()}


def run(
    home: Path,
    *overrides: str,
    epoch: int = 1,
    stop_after: int | None = None,
    spoil: Any = (),
    model: ModelIdentity | None = None,
) -> Any:
    """One incarnation of a trainer. `stop_after`: it is asked to stop after this step. `spoil`: steps without a
    finite loss. `model`: what it says of the model that it begins with."""
    config = config_of(home, *overrides)
    ctx, backend = FakeContext(config, home / "run", epoch), backend_of(config, home)
    accumulate, step = backend.accumulate, iter(range(1, 1000))

    def spoilt(samples: Any) -> Any:
        if next(step) not in spoil:
            return accumulate(samples)
        parameter = next(backend._model.parameters())
        kept = parameter.detach().clone()
        parameter.data.fill_(float("nan"))
        try:
            return accumulate(samples)
        finally:
            parameter.data.copy_(kept)

    backend.accumulate = spoilt  # type: ignore[method-assign]
    said = ctx.metrics

    def metrics(record: dict[str, Any]) -> None:
        said(record)
        if record["step"] == stop_after:
            ctx.stopping.set()

    ctx.metrics = metrics  # type: ignore[method-assign]
    cold = ColdStartPhase(ctx, config, backend, model)  # type: ignore[arg-type]
    done = asyncio.run(cold.run())
    return ctx, backend, cold, done


def test_it_learns_the_answers_and_tells_of_each_step(home: Path) -> None:
    ctx, _, _, done = run(home, *SFT)
    assert done and ctx.readies == 1
    assert [r["step"] for r in ctx.records] == list(range(7)) and all(r["of"] == 6 for r in ctx.records)
    losses = {r["step"]: r["validation_loss"] for r in ctx.records if r.get("validation_loss") is not None}
    assert list(losses) == [0, 3, 6] and losses[6] < losses[0] - 0.5
    assert losses[0] == pytest.approx(math.log(102), rel=0.1), "a fresh model knows nothing of 102 tokens"
    assert ctx.records[6]["learnt_tokens"] == sum(r["tokens"] for r in ctx.records[1:])
    assert all(r["learning_rate"] == 3e-3 and r["sequences"] == 4 for r in ctx.records[1:])
    folder = cold_start_weights(ctx.run_dir)
    assert folder is not None and folder.name == "step-000006" and (folder / "tokenizer.json").exists()
    mark = read_progress(folder)
    assert mark is not None and mark.done and mark.skipped == 0


def test_its_rate_goes_down_over_its_own_steps_also_behind_an_end_in_the_middle(home: Path) -> None:
    decayed = (*SFT, "cold_start.learning_rate_schedule=linear", "cold_start.learning_rate_floor=6e-4")
    ctx, _, _, done = run(home, *decayed, stop_after=3)
    again, _, _, finished_now = run(home, *decayed, epoch=2)
    assert not done and finished_now
    found = [r["learning_rate"] for r in (*ctx.records, *again.records) if "learning_rate" in r]
    assert found == pytest.approx([3e-3 - n * 4e-4 for n in range(6)])


def test_an_end_in_the_middle_changes_nothing(home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = weights(run(home, *SFT)[1])
    other = tmp_path_factory.mktemp("other")
    (other / "model").symlink_to((home / "model").resolve())
    ctx, _, _, done = run(other, *SFT, stop_after=3)
    assert not done and cold_start_weights(ctx.run_dir) is None
    again, backend, _, done = run(other, *SFT, epoch=2)
    assert done and dict(again.events)["cold_start_resumed"]["step"] == 3
    assert [r["step"] for r in again.records] == [4, 5, 6]
    for name, value in weights(backend).items():
        assert torch.equal(value, whole[name]), name


def test_what_is_done_is_not_done_again_and_rl_takes_it_up_without_moments(home: Path) -> None:
    trained = weights(run(home, *SFT)[1])
    ctx, backend, phase, done = run(home, *SFT, epoch=2)
    assert done and not ctx.records and ctx.readies == 0
    objective = Objective.of(ctx.config.algorithm)
    asyncio.run(phase.adopt(objective))
    # It compares before the trainer's start is over.
    assert any("comparing cold_start/step-000006" in reason for _, reason in ctx.extended)
    assert backend.objective is objective and not backend._optimizer.state
    assert backend._temperature == 0.7 and backend._algorithm.learning_rate == 1e-3
    for name, value in weights(backend).items():
        assert torch.equal(value, trained[name]), name
    path = cold_start_folder(home / "run") / "step-000006" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"@")
    with pytest.raises(
        RelaxError, match=r"the weights after the cold start.*model\.safetensors is not what was written"
    ):
        asyncio.run(phase.adopt(objective))


def test_a_damaged_checkpoint_is_passed_over(home: Path) -> None:
    run(home, *SFT, stop_after=5)
    folder = cold_start_folder(home / "run")
    kept = sorted(path.name for path in folder.glob("step-*"))
    assert kept == ["step-000004", "step-000005"]
    content = bytearray((folder / "step-000005" / "model.safetensors").read_bytes())
    content[-1] ^= 0x40
    (folder / "step-000005" / "model.safetensors").write_bytes(content)
    ctx, _, _, done = run(home, *SFT, epoch=2)
    assert done and dict(ctx.events)["cold_start_resumed"]["step"] == 4
    assert dict(ctx.events)["checkpoint_damaged"]["checkpoint"] == "cold_start/step-000005"
    assert "model.safetensors is not what was written" in dict(ctx.events)["checkpoint_damaged"]["why"]
    assert dict(ctx.events)["checkpoint_quarantined"]["folder"] == "cold_start/damaged-step-000005"
    assert sorted(path.name for path in folder.glob("*step-*")) == [
        "damaged-step-000005",
        "step-000004",
        "step-000006",
    ]


@pytest.mark.parametrize(
    "of",
    [(checkpoint, "read_state"), (phase, "read_progress"), (TorchBackend, "restore")],
    ids=["state", "mark", "weights"],
)
def test_a_file_system_that_fails_for_a_moment_costs_no_checkpoint(
    home: Path, of: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(home, *SFT, stop_after=5)
    folder, stale = cold_start_folder(home / "run"), OSError(errno.ESTALE, "Stale file handle")
    real = getattr(*of)

    def fails(*what: Any) -> Any:
        if what[-1].name == "step-000005":
            raise stale
        return real(*what)

    with monkeypatch.context() as patched:
        patched.setattr(*of, fails)
        with pytest.raises((RelaxError, OSError), match="Stale file handle"):
            run(home, *SFT, epoch=2)
    assert sorted(path.name for path in folder.glob("*step-*")) == ["step-000004", "step-000005"]
    ctx, _, _, done = run(home, *SFT, epoch=3)
    assert done and dict(ctx.events)["cold_start_resumed"]["step"] == 5


def test_a_mark_that_the_file_system_refuses_is_no_missing_mark(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(home, *SFT, stop_after=1)
    folder = cold_start_folder(home / "run") / "step-000001"
    assert read_progress(folder) is not None and read_progress(home) is None

    def refused(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(OSError, match="Input/output error"):
        read_progress(folder)
    assert cold_start_weights(home / "run") is None


def test_a_checkpoint_of_another_model_ends_it(home: Path) -> None:
    here, other = ModelIdentity("a", "b", "c"), ModelIdentity("a", "b", "d")
    run(home, *SFT, stop_after=3, model=here)
    with pytest.raises(BadInput, match=r"step-000003.*another set of weights"):
        run(home, *SFT, epoch=2, model=other)
    _, _, done_phase, done = run(home, *SFT, epoch=3, model=here)
    assert done
    _, _, other_phase, _ = run(home, *SFT, epoch=4, model=other)
    objective = Objective.of(config_of(home, *SFT).algorithm)
    with pytest.raises(BadInput, match=r"step-000006.*another set of weights"):
        asyncio.run(other_phase.adopt(objective))
    asyncio.run(done_phase.adopt(objective))


def test_other_data_begin_it_anew(home: Path) -> None:
    rows = [{"prompt": f"q{n}", "completion": f"a{n}"} for n in range(12)]
    name = write_rows(home / "rows.jsonl", rows)
    settings = (f'cold_start.path="{name}"', "cold_start.batch=3", "cold_start.held_out=0")
    run(home, *settings, stop_after=2)
    write_rows(home / "rows.jsonl", [*rows, {"prompt": "more", "completion": "of it"}])
    ctx, _, _, done = run(home, *settings, epoch=2)
    assert done and "cold_start_resumed" not in dict(ctx.events)
    assert "other data" in dict(ctx.events)["checkpoint_damaged"]["why"]


def test_steps_that_are_not_finite_are_thrown_away_and_counted(home: Path) -> None:
    ctx, _, _, done = run(home, *SFT, spoil={2, 4, 5})
    assert done
    assert [bool(r.get("skipped")) for r in ctx.records] == [False, False, True, False, True, True, False]
    assert ctx.records[-1]["skipped_steps"] == 3
    assert [fields["step"] for kind, fields in ctx.events if kind == "cold_start_step_skipped"] == [2, 4, 5]
    assert ctx.records[2]["loss"] is None and ctx.records[3]["loss"] > 0


def test_too_many_of_them_end_it(home: Path) -> None:
    with pytest.raises(GivenUp, match=f"{SKIPPED_IN_A_ROW} steps of the cold start") as caught:
        run(home, *SFT, spoil=set(range(1, 9)))
    assert "cold_start.learning_rate" in caught.value.hint


def test_preferences_are_learnt_against_the_weights_before_the_phase(home: Path) -> None:
    rows = [{"prompt": f"q{n}", "chosen": f"yes {n}", "rejected": f"no {n}!"} for n in range(30)]
    name = write_rows(home / "rows.jsonl", rows)
    settings = (
        f'cold_start.path="{name}"',
        'cold_start.kind="dpo"',
        "cold_start.steps=6",
        "cold_start.batch=6",
        "cold_start.learning_rate=1e-3",
        "cold_start.beta=0.5",
        "cold_start.held_out=0.3",
        "cold_start.checkpoint_every=2",
    )
    ctx, _, _, done = run(home, *settings, stop_after=3)
    assert not done
    first, last = ctx.records[1], ctx.records[3]
    assert ctx.records[0]["validation_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4) and first["sequences"] == 12
    assert last["margin"] > 0 and last["preferred"] > 0.9
    kept = (cold_start_folder(ctx.run_dir) / "reference.safetensors").read_bytes()
    again, _, _, done = run(home, *settings, epoch=2)
    assert done and again.records[-1]["validation_loss"] < 0.5 * math.log(2)
    # A reference of the weights at step 3 would begin with a margin of 0 again.
    assert again.records[0]["margin"] > 0.5 * last["margin"]
    assert (cold_start_folder(ctx.run_dir) / "reference.safetensors").read_bytes() == kept


def test_the_loss_of_a_preference_is_that_of_its_formula() -> None:
    for margin in (-30.0, -0.3, 0.0, 2.0):
        sigmoid = 1 / (1 + math.exp(-margin))
        wanted = -0.9 * math.log(sigmoid) - 0.1 * math.log(1 - sigmoid)
        assert preference_loss(margin, 0.1) == pytest.approx(wanted, rel=1e-9)
    assert math.isfinite(preference_loss(-1e4, 0.0)) and math.isfinite(preference_loss(1e4, 0.2))


def test_what_is_kept_of_the_reference_comes_back_or_is_made_again(tmp_path: Path) -> None:
    values = [
        [np.arange(3, dtype=np.float32), np.zeros(2, np.float32)],
        [np.ones(1, np.float32), np.ones(4, np.float32)],
    ]
    write_reference_logprobs(tmp_path, values, "data")
    found = read_reference_logprobs(tmp_path, "data")
    assert found is not None and [[one.tolist() for one in row] for row in found] == [
        [one.tolist() for one in row] for row in values
    ]
    assert read_reference_logprobs(tmp_path, "other data") is None
    path = tmp_path / "reference.safetensors"
    path.write_bytes(path.read_bytes()[:-8] + b"\x00\x01\x02\x03" * 2)
    assert read_reference_logprobs(tmp_path, "data") is None
    path.write_bytes(b"torn")
    assert read_reference_logprobs(tmp_path, "data") is None
