"""What Megatron-Core needs to run without CUDA. Does nothing where CUDA is there.

Megatron-Core 0.16 names the device of its tensors as "cuda" in many places and uses CUDA's streams and random states
outright. On a machine without a GPU these names are led to the CPU; nothing here changes what is computed.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")
_done = False


def prepare() -> None:
    """Import Megatron-Core, with the CPU in the place of CUDA where there is none. Once a process; call it before any
    other import of ``megatron``.

    Raises:
        ImportError: megatron-core is not installed.
    """
    global _done
    with warnings.catch_warnings():
        # It warns of missing optional packages; which of them are used is decided elsewhere.
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core.optimizer")
        importlib.import_module("megatron.core.models.gpt")
    if _done or torch.cuda.is_available():
        return
    _device()
    _factories()
    _type_names()
    _random_states()
    _streams()
    _experts()
    _done = True


def _replace(owner: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(owner, name, value)


def _device() -> None:
    cpu = torch.device("cpu")
    _replace(torch.cuda, current_device=lambda: cpu, synchronize=lambda *_, **__: None)
    _replace(torch.Tensor, cuda=lambda tensor, *_, **__: tensor)
    _replace(torch.nn.Module, cuda=lambda module, *_, **__: module)


def _factories() -> None:
    """``torch.zeros(…, device="cuda")`` makes a tensor on the CPU."""
    # torch keeps a list of its factories from the first use on; it must hold the originals, or `with torch.device(…)`
    # no longer reaches them, and models that transformers builds under it are filled with garbage.
    importlib.import_module("torch.utils._device")._device_constructors()

    def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **options: Any) -> torch.Tensor:
            if str(options.get("device")).startswith("cuda"):
                options["device"] = torch.device("cpu")
                options.pop("pin_memory", None)
            return make(*args, **options)

        return made

    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _type_names() -> None:
    """The optimizer sorts parameters by type names as "torch.cuda.FloatTensor"."""
    plain = torch.Tensor.type

    def named(tensor: torch.Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
        found = plain(tensor) if dtype is None else plain(tensor, dtype, *args, **options)
        if isinstance(found, str) and "cuda" not in found:
            return found.replace("torch.", "torch.cuda.", 1)
        return found

    _replace(torch.Tensor, type=named)


def _random_states() -> None:
    """One generator, the CPU's, for all of the random states that model parallelism keeps apart."""

    def state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def take(value: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(value)

    _replace(torch.cuda, manual_seed=torch.manual_seed, get_rng_state=state, set_rng_state=take)
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    _replace(random, _get_cuda_rng_state=state, _set_cuda_rng_state=take)


class _Stream:
    """A stream or event: what is queued on it has been done already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, *_: Any) -> _Stream:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _streams() -> None:
    only = _Stream()
    _replace(torch.cuda, Stream=_Stream, Event=_Stream, current_stream=lambda *_, **__: only)
    _replace(torch.cuda, stream=lambda _: contextlib.nullcontext())
    _replace(torch.cuda.nvtx, range_push=lambda *_, **__: None, range_pop=lambda *_, **__: None)


def _experts() -> None:
    utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def to_cpu(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # all_to_all wants its split sizes as numbers, also when the tensor is on the CPU already.
        return value.numpy() if as_numpy and isinstance(value, torch.Tensor) else value

    _replace(utils, maybe_move_tensor_to_cpu=to_cpu)
    _replace(dispatcher, maybe_move_tensor_to_cpu=to_cpu)
    if not hasattr(utils, "te_general_gemm"):
        # The router asks whether this is there, and without TransformerEngine its name is not bound at all.
        utils.te_general_gemm = None
