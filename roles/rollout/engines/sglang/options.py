"""Options, environment and interpreter of an SGLang server, and the checks of [roles.*.sglang]."""

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
"""The release whose endpoints and checksums this engine is written for and tested with."""
PYTHON_VARIABLE = "RELAX_SGLANG_PYTHON"
DEFAULT_PYTHON = ".venv-sglang/bin/python"
"""`make sglang-cpu-env` makes it."""
STAND_INS = Path(__file__).parent / "stand_ins"
"""Modules that replace GPU code that SGLang imports, for machines without a GPU."""
RESERVED_OPTIONS = frozenset(
    {
        "model-path", "host", "port", "api-key", "admin-api-key", "config", "served-model-name", "weight-version",
        "skip-tokenizer-init", "incremental-streaming-output", "dtype", "tp-size", "tp", "tensor-parallel-size",
        "dp-size", "dp", "data-parallel-size", "enable-deterministic-inference", "disable-radix-cache",
        "enable-return-routed-experts", "enable-memory-saver",
    }
)  # fmt: skip
"""Options that the engine sets itself; other settings choose them where they can be chosen."""


RESERVED_POSITIONS = 8
"""Positions of a sequence that the server reserves for itself (6, and some margin): its context length is set to so
many more than the model's, so that sequences can reach the model's last position."""


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between starts.

    Attributes:
        name: random: a server that answers with another name is not ours.
        secrets: a YAML file with the key that every request carries; an argument would show in `ps`.
    """

    model: Path
    port: int
    name: str
    secrets: Path


def device_of(wanted: Literal["auto", "cuda", "cpu"]) -> Device:
    """Return the device; auto: cuda if the machine has a GPU."""
    if wanted != "auto":
        return wanted
    return "cuda" if Path("/dev/nvidia0").exists() else "cpu"


def server_options(
    settings: EngineSettings, device: Device, boot: Boot, *, kv_tokens: int, context: int, shares: bool = False
) -> dict[str, Option]:
    """Return the options of `sglang.launch_server`, True for a flag.

    Args:
        kv_tokens: size of the cache on the CPU, where it is no share of a device's memory.
        context: positions that the model has.
        shares: the trainer uses the same device, in time slices.

    Raises:
        Refused: roles.<kind>.sglang.arguments names an option that the engine sets itself.
    """
    options: dict[str, Option] = {
        "model-path": str(boot.model),
        "host": "127.0.0.1",
        "port": boot.port,
        "config": str(boot.secrets),
        "served-model-name": boot.name,
        "weight-version": "0",
        # The engine exchanges token ids only, and detokenising costs time.
        "skip-tokenizer-init": True,
        "incremental-streaming-output": True,
        "skip-server-warmup": True,
        "log-level": "warning",
        "dtype": settings.dtype,
        "max-running-requests": settings.max_sequences,
        "chunked-prefill-size": settings.prefill_tokens,
        "context-length": context + RESERVED_POSITIONS,
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
            # Without it the server accepts a release of its memory, and keeps the memory.
            options["enable-memory-saver"] = True
    if settings.expert_parallel > 1:
        options["ep-size"] = settings.expert_parallel
    if settings.sglang.deterministic:
        options["enable-deterministic-inference"] = True
    if isinstance(settings, RolloutSettings) and settings.routing:
        # Dense models crash with it; they were refused earlier.
        options["enable-return-routed-experts"] = True
    return options | user_options(settings.sglang.arguments)


def option_key(name: str) -> str:
    """Normalise an option's name: no leading dashes, dashes for underscores."""
    return name.lstrip("-").replace("_", "-")


def user_options(arguments: Mapping[str, Option]) -> dict[str, Option]:
    """Return the user's own options.

    Raises:
        Refused: the engine sets one of them itself.
    """
    named = {option_key(name): value for name, value in arguments.items()}
    if taken := sorted(RESERVED_OPTIONS & named.keys()):
        raise Refused(f"sglang.arguments: {taken[0]}", why="the engine sets it itself", hint="leave it out")
    return named


def as_arguments(options: Mapping[str, Option]) -> list[str]:
    """Return command line arguments; options that are False are omitted."""
    arguments: list[str] = []
    for name, value in options.items():
        if value is True:
            arguments.append(f"--{name}")
        elif value is not False:
            arguments += [f"--{name}", str(value)]
    return arguments


def server_environment(device: Device, threads: int, folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment: the role's, without what belongs to the role alone.

    Args:
        folder: private to the server, for its sockets and temporary files.
    """
    ours = {
        name: value
        for name, value in base.items()
        # The keeper finds what belongs to the run by the run's id.
        if (not name.startswith("RELAX_") or name == "RELAX_RUN_ID") and name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    ours |= {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(folder),
        "PYTHONUNBUFFERED": "1",
        # Imports of missing packages warn by the dozen, which would fill the last lines of the log.
        "PYTHONWARNINGS": "ignore",
        "SGLANG_DISABLE_OUTLINES_DISK_CACHE": "1",
        # For RESERVED_POSITIONS; the engine bounds requests by the model's context.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if device == "cpu":
        ours |= {"PYTHONPATH": str(STAND_INS), "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    elif "PYTHONPATH" in base:
        ours["PYTHONPATH"] = base["PYTHONPATH"]
    return ours


def interpreter(python: str | None, config_dir: Path, own: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the interpreter that runs the server: the one in the config or in RELAX_SGLANG_PYTHON, else that of a
    `.venv-sglang` beside the config or above, else the role's own."""
    if python is None:
        if named := environment.get(PYTHON_VARIABLE):
            return named
        found = (folder / DEFAULT_PYTHON for folder in (config_dir, *config_dir.parents))
        # Another user's is not run: configs in /tmp have a folder above that everybody can write to.
        return next((str(one) for one in found if one.exists() and one.lstat().st_uid in (0, os.getuid())), own)
    path = Path(python).expanduser()
    # Not resolved: a virtual environment is identified by the path of its link.
    return os.path.abspath(config_dir / path) if os.sep in python else python  # noqa: PTH100


def sglang_mismatch(folder: Path) -> str:
    """Return what SGLang silently computes in another way than the model in this folder says; empty: nothing known."""
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


VERSIONS_SCRIPT = (
    "import importlib.metadata as m, importlib.util as u, sys\n"
    "names = ('sglang', 'torch', 'transformers', 'torch_memory_saver')\n"
    "print(*(m.version(n) if u.find_spec(n) else '-' for n in names), '%d.%d' % sys.version_info[:2])"
)
VERSIONS_TIMEOUT_S = 30.0
OPTIONS_SCRIPT = (
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
    """Find what keeps roles with engine = "sglang" from starting, as far as it can be seen without a start."""
    queried: dict[str, tuple[str, str, bool]] = {}
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
        if python not in queried:
            queried[python] = query_interpreter(python)
        version, why, saves = queried[python]
        device = device_of(table.sglang.device)
        if why:
            yield Problem(key, why, INSTALL + SUPPORTED)
        elif version != SUPPORTED:
            say(f"warning: {python} has sglang {version}; this engine is written to {SUPPORTED}")
        if not why and table.sglang.arguments:
            if (python, device) not in known:
                known[python, device] = option_names(python, device)
            options = known[python, device]
            for name in table.sglang.arguments:
                if options is not None and option_key(name) not in options:
                    hint = (
                        did_you_mean(option_key(name), options) or "`python -m sglang.launch_server --help` lists them"
                    )
                    message = f"sglang {version} has no option '{option_key(name)}'"
                    yield Problem((*path, "arguments", name), message, hint, at="key")
        mode = config.table(AlgorithmTable).mode
        if not why and device == "cuda" and mode in SHARING and not saves:
            message = f'mode = "{mode}": without torch_memory_saver in {python} its server would keep the memory'
            yield Problem(key, message, "pip install torch-memory-saver there")
        if device == "cuda" and not Path("/dev/nvidiactl").exists():
            message = 'device = "cuda", and this machine shows no GPU'
            yield Problem((*path, "device"), message, 'leave it out, or set device = "cpu"')


def query_interpreter(python: str) -> tuple[str, str, bool]:
    """Return an interpreter's version of sglang, why it cannot run a server, and whether one can release memory."""
    try:
        answer = subprocess.run(
            [python, "-I", "-c", VERSIONS_SCRIPT],
            capture_output=True,
            text=True,
            timeout=VERSIONS_TIMEOUT_S,
            check=False,
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
    """Return the options that an interpreter's sglang knows, without leading dashes; None if they cannot be listed.

    The import takes seconds, and has the server's environment, because sglang looks for the device.
    """
    with tempfile.TemporaryDirectory(prefix="relax-") as folder:
        try:
            answer = subprocess.run(
                [python, "-c", OPTIONS_SCRIPT],
                capture_output=True,
                text=True,
                timeout=OPTIONS_TIMEOUT_S,
                check=True,
                env=server_environment(device, 1, Path(folder), os.environ),
            )
            return frozenset(msgspec.json.decode((answer.stdout.splitlines() or [""])[-1], type=list[str]))
        except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
            gist = (str(error).splitlines() or [type(error).__name__])[-1][:200]
            say(f"warning: sglang.arguments are not checked: {python} does not list its options: {gist}")
            return None
