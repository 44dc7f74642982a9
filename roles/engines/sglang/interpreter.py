"""Whether an interpreter can run the server: asked before anything starts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.roles.engines.sglang.options import SUPPORTED, device_of, interpreter, user_options
from relax_rt.roles.engines.tables import SHARING
from relax_rt.roles.models.cache import say
from relax_rt.roles.sections import EngineSettings, RLConfig
from relax_rt.transport.errors import Refused

ASK = (
    "import importlib.metadata as m, importlib.util as u, sys\n"
    "names = ('sglang', 'torch', 'transformers', 'torch_memory_saver')\n"
    "print(*(m.version(n) if u.find_spec(n) else '-' for n in names), '%d.%d' % sys.version_info[:2])"
)
ASK_TIMEOUT_S = 30.0
INSTALL = "`make sglang-cpu-env` makes one for the CPU; with a GPU: pip install sglang=="


def check_sglang(config: RLConfig, config_dir: Path) -> Iterator[Problem]:
    """What keeps roles with engine = "sglang" from starting, as far as it shows without a start."""
    asked: dict[str, tuple[str, str, bool]] = {}
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
        mode = config.algorithm.mode
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
