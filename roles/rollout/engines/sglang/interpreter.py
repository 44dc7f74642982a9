"""Whether an interpreter can run the server: asked before anything starts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from relax_rt.config.problems import KeyPath, Problem, did_you_mean
from relax_rt.config.schema import RunConfig
from relax_rt.roles.models.cache import say
from relax_rt.roles.rollout.engines.settings import EngineSettings
from relax_rt.roles.rollout.engines.sglang.options import (
    SUPPORTED,
    Device,
    Option,
    device_of,
    interpreter,
    plain,
    server_environment,
    user_options,
)
from relax_rt.roles.training.algorithms.settings import SHARING, AlgorithmTable
from relax_rt.transport.rpc.errors import Refused

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
