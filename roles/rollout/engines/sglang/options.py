"""What an SGLang server is started with, and whether an interpreter can run it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from relax_rt.config.problems import KeyPath, Problem, did_you_mean
from relax_rt.config.schema import RunConfig
from relax_rt.roles.models.cache import say
from relax_rt.roles.models.shape import read_shape
from relax_rt.roles.rollout.engines.settings import EngineSettings, RolloutSettings
from relax_rt.roles.training.algorithms.settings import SHARING, AlgorithmTable
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


ASK = (
    "import importlib.metadata as m, importlib.util as u, sys\n"
    "names = ('sglang', 'torch', 'transformers', 'torch_memory_saver')\n"
    "print(*(m.version(n) if u.find_spec(n) else '-' for n in names), '%d.%d' % sys.version_info[:2])"
)
ASK_TIMEOUT_S = 30.0
OPTIONS = (
    "import sys\n"
    "sys.path[:] = [folder for folder in sys.path if folder]\n"
    "import argparse, json\n"
    "from sglang.srt.server_args import ServerArgs\n"
    "parser = argparse.ArgumentParser()\n"
    "ServerArgs.add_cli_args(parser)\n"
    "print(json.dumps(sorted(name[2:] for name in parser._option_string_actions if name.startswith('--'))))"
)
OPTIONS_TIMEOUT_S = 90.0
"""5 s on an idle core, most of it the import of torch."""
INSTALL = "`make sglang-cpu-env` makes one for the CPU; with a GPU: pip install sglang=="


def check_sglang(config: RunConfig, config_dir: Path) -> Iterator[Problem]:
    """What keeps roles with engine = "sglang" from starting, as far as it shows without a start."""
    asked: dict[str, tuple[str, str, bool]] = {}
    known: dict[tuple[str, Device], frozenset[str] | None] = {}
    for kind, table in config.roles.items():
        if not isinstance(table, EngineSettings) or table.engine != "sglang":
            continue
        path: KeyPath = ("roles", kind, "sglang")
        if importlib.util.find_spec("httpx") is None:
            yield Problem(
                ("roles", kind, "engine"), "httpx is not installed: it talks to the server", "pip install httpx"
            )
        try:
            user_options(table.sglang.arguments)
        except Refused as error:
            yield Problem((*path, "arguments"), f"{error.what}: {error.why}", error.hint)
        if table.sglang.weights != "file" and importlib.util.find_spec("torch") is None:
            message = f'weights = "{table.sglang.weights}" needs torch in the role\'s own interpreter, and it has none'
            yield Problem((*path, "weights"), message, 'pip install torch, or set weights = "file"')
        start = table.start_timeout_s or config.supervision.start_timeout_s
        if table.sglang.boot_timeout_s >= start:
            message = (
                f"boot_timeout_s = {table.sglang.boot_timeout_s:g} is not below the role's start_timeout_s = {start:g}"
            )
            hint = f"raise roles.{kind}.start_timeout_s: the role would be killed before it could say why"
            yield Problem((*path, "boot_timeout_s"), message, hint)
        for name in ("tensor_parallel", "data_parallel"):
            if (value := getattr(table, name)) > 1:
                message = f"{name} = {value}: what a server of more than one rank holds cannot be verified yet"
                yield Problem(("roles", kind, name), message, f"set {name} = 1; roles.{kind}.count makes more engines")
        python = interpreter(table.sglang.python, config_dir, getattr(table, "python", None) or sys.executable)
        key = (*path, "python") if table.sglang.python is not None else ("roles", kind, "engine")
        if python not in asked:
            asked[python] = ask(python)
        version, why, saves = asked[python]
        device = device_of(table.sglang.device)
        if why:
            yield Problem(key, why, INSTALL + SUPPORTED)
        elif version != SUPPORTED:
            say(f"warning: {python} has sglang {version}; this engine is written to {SUPPORTED}")
        if not why and table.sglang.arguments:
            if (python, device) not in known:
                known[python, device] = option_names(python, device)
            yield from _unknown((*path, "arguments"), table.sglang.arguments, version, known[python, device])
        mode = config.table(AlgorithmTable).mode
        if not why and device == "cuda" and mode in SHARING and not saves:
            message = f'mode = "{mode}": without torch_memory_saver in {python} its server would keep the memory'
            yield Problem(key, message, "pip install torch-memory-saver there")
        if device == "cuda" and not Path("/dev/nvidiactl").exists():
            message = 'device = "cuda", and this machine shows no GPU'
            yield Problem((*path, "device"), message, 'leave it out, or set device = "cpu"')


def ask(python: str) -> tuple[str, str, bool]:
    """The version of sglang that an interpreter has; why it cannot run a server; whether one can give memory back."""
    try:
        answer = subprocess.run(
            [python, "-I", "-c", ASK], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return "", f"there is no interpreter {python}", False
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{python} does not run: {error}", False
    if answer.returncode:
        last = answer.stderr.strip().splitlines()[-1:] or [f"exit status {answer.returncode}"]
        return "", f"{python} does not run: {last[0]}", False
    sglang, torch, transformers, saver, _ = answer.stdout.split()
    lacking = [name for name, v in (("sglang", sglang), ("torch", torch), ("transformers", transformers)) if v == "-"]
    return sglang, f"{python} has no {', '.join(lacking)}" if lacking else "", saver != "-"


def option_names(python: str, device: Device) -> frozenset[str] | None:
    """The options that the sglang of an interpreter knows, without the dashes before them; None where it does not say.

    Its import takes seconds, and is done as the server does it: sglang looks for the device.
    """
    with tempfile.TemporaryDirectory(prefix="relax-") as folder:
        try:
            answer = subprocess.run(
                [python, "-c", OPTIONS],
                capture_output=True,
                text=True,
                timeout=OPTIONS_TIMEOUT_S,
                check=True,
                env=server_environment(device, 1, Path(folder), os.environ),
            )
            return frozenset(msgspec.json.decode((answer.stdout.splitlines() or [""])[-1], type=list[str]))
        except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
            gist = (str(error).splitlines() or [type(error).__name__])[-1][:200]
            say(f"warning: sglang.arguments are not checked: {python} does not tell its options: {gist}")
            return None


def _unknown(
    path: KeyPath, arguments: Mapping[str, Option], version: str, known: frozenset[str] | None
) -> Iterator[Problem]:
    for name in arguments:
        if known is not None and plain(name) not in known:
            hint = did_you_mean(plain(name), known) or "`python -m sglang.launch_server --help` lists them"
            yield Problem((*path, name), f"sglang {version} has no option '{plain(name)}'", hint, at="key")
