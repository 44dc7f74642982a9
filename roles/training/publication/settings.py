"""The table [publication] of roles.toml."""

from __future__ import annotations

from typing import Literal

from relax_rt.config.schema import Filled, Seconds, Table

Communicator = Literal["nccl", "gloo"]


class PublicationTable(Table):
    """How new weights are published to the engines."""

    ack_timeout_s: Seconds = 60.0
    """From a commit, or from hearing of it, until an engine must have the weights whole. An engine that is late ends
    and is started again; the trainer waits for none longer than this."""
    delta: bool = False
    """Put what changed since the version before beside each version where it is less than half of it. Engines that
    have the version before take that alone, and a stream brings that alone to another node."""
    adapters: bool = False
    """With roles.trainer.lora: put the adapters alone beside each version, for other nodes, which have the model's own
    weights and add them as the trainer does: the same bits. Saves bytes between nodes, costs computing."""
    carrier: Literal["auto", "shared_memory", "stream", "directory", "collective", "cuda_ipc"] = "auto"
    """How engines get weights. auto: shared memory on the trainer's node, a stream to other nodes, and `directory` if
    that is set and the other fails. collective: a broadcast to the engines on the trainer's node, behind each commit.
    cuda_ipc: from device memory of the trainer, to engines that share its GPU. Whoever these do not reach has the
    version as with auto."""
    communicator: Literal["auto", "nccl", "gloo"] = "auto"
    """With carrier = "collective": NCCL between GPUs, or gloo between CPUs. auto: NCCL where trainer and rollouts have
    GPUs."""
    broadcast_timeout_s: Seconds = 20.0
    """For one broadcast; an engine that has not got it by then takes the version from the stage."""
    wire_dtype: Literal["float32", "bfloat16", "float8"] | None = None
    """What weights are rounded to for their way, so that a stream or broadcast sends fewer bytes. The version is what
    arrives: all engines have the same. float8: matrices, with a scale each; the rest goes as it is. Unset: the engines'
    dtype."""
    directory: Filled | None = None
    """A folder that all nodes see, where each version is put as safetensors files too, in a folder of the run's;
    relative to the config file. Only the newest stays."""
    directory_timeout_s: Seconds = 300.0
    """For one version to be written there. A disk that is full or too slow costs the run nothing but this copy, unless
    carrier = "directory"."""


def wire_of(named: str | None, published: str) -> Literal["bfloat16", "float8_e4m3fn"] | None:
    """What versions of this dtype are rounded to for the wire; None: they go as they are."""
    if named == "float8":
        return "float8_e4m3fn"
    return "bfloat16" if named == "bfloat16" and published == "float32" else None
