"""Whose layers a rank of Megatron computes with, and that it says so where they are not the device's default."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from trainer_parts import config_of

from relax_rt.config.problems import BadInput
from relax_rt.roles.training import open_backend as start
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.roles.training.megatron.model import LayerChoice, Wanted, decide_layers
from relax_rt.transport.rpc.errors import Refused

NO_LOOP: Any = None
"""Only ranks of a gang over several nodes use the loop."""
TE, LOCAL = LayerChoice("transformer_engine"), LayerChoice("local")
FALLBACK = LayerChoice("local", fallback="transformer_engine is not installed")


@pytest.mark.parametrize(
    ("wanted", "cuda", "installed", "choice"),
    [
        ("auto", True, True, TE),
        ("auto", True, False, FALLBACK),
        ("auto", False, True, LOCAL),
        ("auto", False, False, LOCAL),
        ("local", True, True, LOCAL),
        ("local", True, False, LOCAL),
        ("local", False, False, LOCAL),
        ("transformer_engine", True, True, TE),
    ],
)
def test_only_what_is_not_the_devices_default_and_not_asked_for_is_a_fallback(
    wanted: Wanted, cuda: bool, installed: bool, choice: LayerChoice
) -> None:
    assert decide_layers(wanted, cuda=cuda, installed=installed) == choice


@pytest.mark.parametrize(
    ("cuda", "installed", "why"),
    [(True, False, "not installed"), (False, True, "no CUDA device"), (False, False, "no CUDA device")],
)
def test_transformer_engine_by_name_is_refused_where_it_cannot_be(cuda: bool, installed: bool, why: str) -> None:
    with pytest.raises(Refused, match=why):
        decide_layers("transformer_engine", cuda=cuda, installed=installed)


class Told:
    """What a rank says, and which layers its backend was given."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.warnings: list[dict[str, Any]] = []
        self.infos: list[dict[str, Any]] = []
        self.layers = ""

    def context(self, wanted: Wanted, home: Any) -> Any:
        return SimpleNamespace(
            config=config_of(home, 1, {}),
            settings=TrainerSettings(backend="megatron", dtype="bfloat16", layers=wanted),
            run_dir=home,
            log=SimpleNamespace(
                info=lambda _, **facts: self.infos.append(facts), warning=lambda _, **facts: self.warnings.append(facts)
            ),
            progress=SimpleNamespace(advance=None, waiting=None),
            who=SimpleNamespace(slot="trainer/0", epoch=1),
            event=lambda kind, **facts: self.events.append((kind, facts)),
        )

    def backend(self, *_: Any, layers: str, **__: Any) -> None:
        self.layers = layers


def opened(told: Told, wanted: Wanted, monkeypatch: pytest.MonkeyPatch, home: Any, *, cuda: bool, at: int = 0) -> None:
    """A rank of a gang on a machine without TransformerEngine."""
    gang = SimpleNamespace(rank=at, local_rank=at, world_size=2, local_world_size=2, store=lambda: None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for name, stand_in in {
        "Gang": SimpleNamespace(here=lambda: gang),
        "MegatronRanks": lambda *_, **__: None,
        "model_folder": lambda _: home,
        "MegatronBackend": told.backend,
        "Leader": lambda *_: None,
        "Follower": lambda *_: None,
    }.items():
        monkeypatch.setattr(start, name, stand_in)
    start.open_megatron(told.context(wanted, home), Objective.__new__(Objective), NO_LOOP)


def test_local_layers_on_cuda_are_a_named_fallback(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    told = Told()
    opened(told, "auto", monkeypatch, tmp_path, cuda=True)
    ((kind, facts),) = told.events
    assert (kind, told.layers, told.warnings) == ("layers_fallback", "local", [facts])
    assert facts["layers"] == "local" and facts["why"] == "transformer_engine is not installed"
    assert "sequence by sequence" in facts["costs"] and "install transformer-engine" in facts["hint"]


@pytest.mark.parametrize(("wanted", "cuda"), [("auto", False), ("local", False), ("local", True)])
def test_local_layers_that_are_chosen_are_no_fallback(
    wanted: Wanted, cuda: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    told = Told()
    opened(told, wanted, monkeypatch, tmp_path, cuda=cuda)
    assert (told.events, told.warnings, told.infos, told.layers) == ([], [], [{"layers": "local"}], "local")


def test_one_rank_of_a_machine_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    told = Told()
    opened(told, "auto", monkeypatch, tmp_path, cuda=True, at=1)
    assert (told.events, told.warnings, told.infos, told.layers) == ([], [], [], "local")


def test_layers_that_cannot_be_end_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    told = Told()
    with pytest.raises(BadInput, match="layers of TransformerEngine"):
        opened(told, "transformer_engine", monkeypatch, tmp_path, cuda=True)
    assert not told.layers
