"""What the server is started with: its options and environment. Pure functions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from relax_rt.roles.models.shape import read_shape
from relax_rt.roles.rollout.engines.settings import EngineSettings, RolloutSettings
from relax_rt.transport.rpc.errors import Refused, RelaxError

Device = Literal["cuda", "cpu"]
Option = bool | int | float | str

SUPPORTED = "0.5.23"
"""The release whose endpoints and checksums this engine is written to and tested with."""
NAMED = "RELAX_SGLANG_PYTHON"
MADE_FOR_IT = ".venv-sglang/bin/python"
"""`make sglang-cpu-env` makes it."""
STAND_INS = Path(__file__).parent / "stand_ins"
"""Modules that stand where SGLang imports GPU code, for a machine without one."""
OURS = frozenset(
    {
        "model-path", "host", "port", "api-key", "admin-api-key", "config", "served-model-name", "weight-version",
        "skip-tokenizer-init", "incremental-streaming-output", "dtype", "tp-size", "tp", "tensor-parallel-size",
        "dp-size", "dp", "data-parallel-size", "enable-deterministic-inference", "disable-radix-cache",
        "enable-return-routed-experts", "enable-memory-saver",
    }
)  # fmt: skip
"""Options that the engine rests on; settings of ours name them where they can be chosen."""


KEPT_BACK = 8
"""Positions of a sequence that the server keeps for itself (6 and some): it takes inputs, and samples, up to so many
below its context length, and must do both to the model's last position."""


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What differs from start to start.

    Attributes:
        name: drawn anew for each start: a server that answers with another name is not ours.
        secrets: a YAML file with the key that every request carries; not in `ps`, as an argument would be.
    """

    model: Path
    port: int
    name: str
    secrets: Path


def device_of(wanted: Literal["auto", "cuda", "cpu"]) -> Device:
    """auto: cuda where the machine has a GPU."""
    if wanted != "auto":
        return wanted
    return "cuda" if Path("/dev/nvidia0").exists() else "cpu"


def server_options(
    settings: EngineSettings, device: Device, boot: Boot, *, kv_tokens: int, context: int, shares: bool = False
) -> dict[str, Option]:
    """Options of `sglang.launch_server`, True for a flag.

    Args:
        kv_tokens: room of the cache on the CPU, where no share of a device's memory says it.
        context: positions that the model has.
        shares: whether the trainer uses the same device in turns.

    Raises:
        Refused: roles.<kind>.sglang.arguments names an option that the engine rests on.
    """
    options: dict[str, Option] = {
        "model-path": str(boot.model),
        "host": "127.0.0.1",
        "port": boot.port,
        "config": str(boot.secrets),
        "served-model-name": boot.name,
        "weight-version": "0",
        # Token ids come and go: text is the role's business, and detokenising costs.
        "skip-tokenizer-init": True,
        "incremental-streaming-output": True,
        "skip-server-warmup": True,
        "log-level": "warning",
        "dtype": settings.dtype,
        "max-running-requests": settings.max_sequences,
        "chunked-prefill-size": settings.prefill_tokens,
        "context-length": context + KEPT_BACK,
        "tp-size": settings.tensor_parallel,
        "grammar-backend": "none",
    }
    if device == "cpu":
        options |= {
            "device": "cpu",
            "attention-backend": "torch_native",
            "sampling-backend": "pytorch",
            "disable-cuda-graph": True,
            "disable-overlap-schedule": True,
            "max-total-tokens": kv_tokens,
            "mem-fraction-static": 0.2,
        }
    else:
        options["mem-fraction-static"] = settings.memory_fraction
        if shares:
            # Without it the server says yes to a release of its memory, and keeps it.
            options["enable-memory-saver"] = True
    if settings.expert_parallel > 1:
        options["ep-size"] = settings.expert_parallel
    if settings.sglang.deterministic:
        options["enable-deterministic-inference"] = True
    if isinstance(settings, RolloutSettings) and settings.routing:
        # Dense models crash with it; they are refused before.
        options["enable-return-routed-experts"] = True
    return options | user_options(settings.sglang.arguments)


def plain(name: str) -> str:
    """An option's name as the others are written: without dashes before it, and with them within."""
    return name.lstrip("-").replace("_", "-")


def user_options(arguments: Mapping[str, Option]) -> dict[str, Option]:
    """The user's own options.

    Raises:
        Refused: one of them is ours.
    """
    named = {plain(name): value for name, value in arguments.items()}
    if taken := sorted(OURS & named.keys()):
        raise Refused(f"sglang.arguments: {taken[0]}", why="the engine sets it itself", hint="leave it out")
    return named


def as_arguments(options: Mapping[str, Option]) -> list[str]:
    """Command line arguments; an option that is False is left out."""
    arguments: list[str] = []
    for name, value in options.items():
        if value is True:
            arguments.append(f"--{name}")
        elif value is not False:
            arguments += [f"--{name}", str(value)]
    return arguments


def server_environment(device: Device, threads: int, folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: the role's, without what belongs to the role alone.

    Args:
        folder: private to the server, for its sockets and temporary files.
    """
    ours = {
        name: value
        for name, value in base.items()
        # The run's id stays: by it the keeper knows what belongs to the run.
        if (not name.startswith("RELAX_") or name == "RELAX_RUN_ID") and name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    ours |= {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(folder),
        "PYTHONUNBUFFERED": "1",
        # Imports of what is not on a machine warn by the dozen; the last lines of the log are to be of use.
        "PYTHONWARNINGS": "ignore",
        "SGLANG_DISABLE_OUTLINES_DISK_CACHE": "1",
        # For the positions that it keeps back; the engine holds requests to the model's context.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if device == "cpu":
        ours |= {"PYTHONPATH": str(STAND_INS), "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    elif "PYTHONPATH" in base:
        ours["PYTHONPATH"] = base["PYTHONPATH"]
    return ours


def interpreter(python: str | None, config_dir: Path, own: str, environment: Mapping[str, str] = os.environ) -> str:
    """The interpreter that runs the server: the one that is named, in the config or in the environment, or that of an
    environment made for it beside the config or above, or the role's own."""
    if python is None:
        if named := environment.get(NAMED):
            return named
        found = (folder / MADE_FOR_IT for folder in (config_dir, *config_dir.parents))
        # Somebody else's is not run: /tmp is above many a config.
        return next((str(one) for one in found if one.exists() and one.lstat().st_uid in (0, os.getuid())), own)
    path = Path(python).expanduser()
    # Not resolved: a virtual environment is known by the path of its link.
    return os.path.abspath(config_dir / path) if os.sep in python else python  # noqa: PTH100


def unlike_the_model(folder: Path) -> str:
    """What SGLang computes otherwise than the model in this folder says, without a word; empty if nothing is known."""
    try:
        shape = read_shape(folder)
    except RelaxError:
        return ""
    if not any(shape.sparse):
        return ""
    if shape.tied:
        return "overlooks tie_word_embeddings = true: it has no head then, and all its logits are zero"
    if not all(shape.sparse):
        return f"has experts in every layer, and this model has none in layer {shape.sparse.index(False)}"
    return ""
