"""What a model cannot be asked for is said before the run starts, or ends it at the first try."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from test_packing_rows import falcon  # noqa: E402
from trainer_parts import config_of  # noqa: E402

from relax_rt.config.problems import BadInput  # noqa: E402
from relax_rt.interfaces.agent import Diagnosis  # noqa: E402
from relax_rt.roles.training import open_backend as megatron_start  # noqa: E402
from relax_rt.roles.training.algorithms.objective import Objective  # noqa: E402
from relax_rt.roles.training.backend.gang import Follower, Leader  # noqa: E402
from relax_rt.roles.training.backend.settings import (  # noqa: E402
    CriticSettings,
    ReferenceSettings,
    TrainerSettings,
)
from relax_rt.roles.training.batch.attention import (  # noqa: E402
    architecture_packs,
    supports_segments,
)
from relax_rt.roles.training.checks import CANNOT_PACK, check_packing  # noqa: E402
from relax_rt.roles.training.critic.role import CriticRole  # noqa: E402
from relax_rt.roles.training.open_backend import open_torch  # noqa: E402
from relax_rt.roles.training.reference.role import ReferenceRole  # noqa: E402
from relax_rt.supervision.diagnosis import classify_exception  # noqa: E402
from relax_rt.transport.rpc.errors import Refused  # noqa: E402

NO_LOOP: Any = None
"""Only ranks of a gang over several nodes use the loop."""


def context(folder: Path, settings: Any, home: Path) -> Any:
    """What a role is given of a run of this model."""
    (folder / "tokenizer.json").touch()
    quiet = SimpleNamespace(info=lambda *_, **__: None, warning=lambda *_, **__: None)
    config = config_of(folder, 1, {})
    config.roles["trainer"] = settings if isinstance(settings, TrainerSettings) else TrainerSettings()
    return SimpleNamespace(
        config=config,
        settings=settings,
        run_dir=home,
        log=quiet,
        progress=SimpleNamespace(advance=lambda *_: None, extend=lambda *_: None, waiting=lambda *_: None),
        who=SimpleNamespace(slot="trainer/0", epoch=1),
        event=lambda *_, **__: None,
    )


def windowed(model_dir: Path, folder: Path) -> Path:
    """The model with an attention that does not see all of its context, which is not computed."""
    transformers.AutoModelForCausalLM.from_pretrained(model_dir).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ends_the_run(error: BadInput) -> bool:
    """As the supervisor judges what a role says of its end."""
    return Diagnosis(slot="trainer/0", epoch=1, kind=classify_exception(error), cause=str(error)).final


def test_packing_that_cannot_be_ends_the_run_at_the_first_try(tmp_path: Path) -> None:
    ctx = context(falcon(tmp_path), TrainerSettings(dtype="float32", threads=1, packing="required"), tmp_path)
    with pytest.raises(BadInput, match=r"roles.trainer.packing.*several sequences in a row.*Qwen3") as caught:
        open_torch(ctx, Objective.of(ctx.config.algorithm), NO_LOOP)
    assert ends_the_run(caught.value)


def test_a_model_that_is_not_computed_whole_ends_the_run(model_dir: Path, tmp_path: Path) -> None:
    folder = windowed(model_dir, tmp_path / "model")

    def trainer() -> None:
        ctx = context(folder, TrainerSettings(dtype="float32", threads=1), tmp_path)
        open_torch(ctx, Objective.of(ctx.config.algorithm), NO_LOOP)

    def reference() -> None:
        ctx = context(folder, ReferenceSettings(dtype="float32", threads=1), tmp_path)
        ReferenceRole(ctx)._load(folder)

    def critic() -> None:
        ctx = context(folder, CriticSettings(dtype="float32", threads=1), tmp_path)
        CriticRole(ctx)._load()

    for opens in (trainer, reference, critic):
        with pytest.raises(BadInput, match="sliding_window = 16") as caught:
            opens()
        assert ends_the_run(caught.value), opens.__name__


def test_what_a_rank_of_megatron_refuses_ends_the_run(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: Any, **__: Any) -> None:
        raise Refused("4 experts over expert = 3", why="they do not divide evenly")

    gang = SimpleNamespace(rank=0, local_rank=0, world_size=1, local_world_size=1, store=lambda: None)
    monkeypatch.setattr(megatron_start.Gang, "here", lambda: gang)
    monkeypatch.setattr(megatron_start, "MegatronRanks", lambda *_, **__: None)
    monkeypatch.setattr(megatron_start, "MegatronBackend", refusing)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ctx = context(model_dir, TrainerSettings(backend="megatron", dtype="bfloat16", threads=1), tmp_path)
    with pytest.raises(BadInput, match="they do not divide evenly") as caught:
        megatron_start.open_megatron(ctx, Objective.of(ctx.config.algorithm), NO_LOOP)
    assert ends_the_run(caught.value)


async def test_the_ranks_of_a_gang_over_several_nodes_ask_the_queue_where_payload_lies(tmp_path: Path) -> None:
    async def payload_servers(owners: list[str]) -> dict[str, str]:
        return dict.fromkeys(owners, "tcp://127.0.0.1:1")

    async def queue() -> Any:
        return SimpleNamespace(payload_servers=payload_servers)

    ctx: Any = SimpleNamespace(
        payload_dir=tmp_path,
        spill_dir=None,
        fetcher=None,
        queue=queue,
        progress=SimpleNamespace(waiting=lambda _: None),
    )
    backend: Any = SimpleNamespace(ranks=None)
    loop = asyncio.get_running_loop()
    for rank, kind in ((0, Leader), (1, Follower)):
        gang: Any = SimpleNamespace(rank=rank, world_size=2, local_world_size=1)
        member = megatron_start._member(ctx, gang, backend, loop)
        assert isinstance(member, kind) and member.lease_reader is not None
        found = await asyncio.to_thread(member.lease_reader._locate, ["rollout-0-1"])
        assert found == {"rollout-0-1": "tcp://127.0.0.1:1"}
        gang.local_world_size = 2
        assert megatron_start._member(ctx, gang, backend, loop).lease_reader is None, "its ranks share memory"


# Before anything starts.

COMMON: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "pad_token_id": 299,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", COMMON),
    "qwen2": ("Qwen2", COMMON),
    "qwen3": ("Qwen3", {**COMMON, "head_dim": 32}),
    "qwen3_moe": ("Qwen3Moe", {**COMMON, **EXPERTS}),
    "phi3": ("Phi3", COMMON),
    "gpt_neox": ("GPTNeoX", COMMON),
    "olmo2": ("Olmo2", COMMON),
    "falcon": ("Falcon", {**COMMON, "alibi": False, "bias": False}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_model_of_its_kind_packs_where_the_model_does(kind: str, tmp_path: Path) -> None:
    name, values = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**values)
    config.architectures = [f"{name}ForCausalLM"]
    config.save_pretrained(tmp_path)
    whole = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()
    state = torch.get_rng_state()
    found = architecture_packs(tmp_path)
    assert found == supports_segments(whole.get_decoder()) == (kind != "falcon")
    assert torch.equal(torch.get_rng_state(), state)
    assert config.to_dict()["hidden_size"] == 96

    ctx = context(tmp_path, TrainerSettings(packing="required"), tmp_path)
    problems = list(check_packing(ctx.config, tmp_path))
    assert len(problems) == (kind == "falcon")
    assert all(one.path == ("roles", "trainer", "packing") and CANNOT_PACK in one.message for one in problems)
    for settings in (TrainerSettings(), TrainerSettings(packing="required", backend="megatron")):
        ctx.config.roles["trainer"] = settings
        assert not list(check_packing(ctx.config, tmp_path))


@pytest.mark.parametrize("text", ['{"model_type": "nobody_s"}', "{", '{"model_type": "llama", "hidden_size": "wide"}'])
def test_of_a_kind_that_is_not_known_nothing_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert architecture_packs(tmp_path) is None
    ctx = context(tmp_path, TrainerSettings(packing="required"), tmp_path)
    assert not list(check_packing(ctx.config, tmp_path))
