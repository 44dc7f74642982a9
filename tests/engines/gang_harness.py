"""Gangs of real ranks that tests drive, and samples for them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_rt.roles.base.sample import Sample, bare_meta
from relax_rt.roles.training.checkpoints.digests import DIGEST_SUFFIX, collect_digests, digest_of, verify_digests
from relax_rt.roles.training.checkpoints.optimizer_state import rank_file
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Corrupt

HERE = Path(__file__).parent
CALL_S = 600.0
LOOK_S = 0.2
VOCABULARY = 131
"""Odd, so that it is padded where it is cut."""


LIVING: list[Gang] = []
"""Those that were started and not ended yet."""


class Gang:
    """Processes that call collectives together. Starting one costs seconds: it serves many tests.

    Args:
        work: the file with the functions that they run.
    """

    def __init__(self, world: int, work: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gang-")
        address = f"{self._folder.name}/s"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen(world)
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        script, folder = str(HERE / "far_end.py"), self._folder.name
        self._processes = [
            subprocess.Popen([sys.executable, script, address, str(rank), str(world), folder, str(work)], env=env)
            for rank in range(world)
        ]
        self._ranks: list[Connection] = []
        LIVING.append(self)
        try:
            self._ranks = self._met(listener)
        except BaseException:
            self.kill()
            raise
        finally:
            listener.close()

    def _met(self, listener: socket.socket) -> list[Connection]:
        """A connection of each rank, in their order; one that ends before it has come is told of."""
        listener.settimeout(LOOK_S)
        found: dict[int, Connection] = {}
        deadline = time.monotonic() + CALL_S
        while len(found) < len(self._processes):
            try:
                connection = Connection(listener.accept()[0].detach())
                found[connection.recv()] = connection
            except TimeoutError:
                codes = {rank: process.poll() for rank, process in enumerate(self._processes)}
                ended = [f"rank {rank} ended with exit code {code}" for rank, code in codes.items() if code is not None]
                assert not ended, ", ".join(ended)
                assert time.monotonic() < deadline, f"ranks {sorted(codes.keys() - found.keys())} do not come"
        return [found[rank] for rank in range(len(self._processes))]

    def call(self, name: str, **options: Any) -> list[Any]:
        """Run a function of `work` on all ranks; their answers."""
        for rank in self._ranks:
            rank.send((name, options))
        answers = []
        for number, rank in enumerate(self._ranks):
            assert rank.poll(CALL_S), f"rank {number} does not answer to {name}"
            answers.append(rank.recv())
        for number, (ok, answer) in enumerate(answers):
            assert ok, f"rank {number}: {answer}"
        return [answer for _, answer in answers]

    def call_first(self, name: str, **options: Any) -> Any:
        """`call` of a function at whose end not all ranks are there to answer; rank 0's answer."""
        for rank in self._ranks:
            rank.send((name, options))
        assert self._ranks[0].poll(CALL_S), f"rank 0 does not answer to {name}"
        ok, answer = self._ranks[0].recv()
        assert ok, answer
        return answer

    def kill(self) -> None:
        """End all ranks, whatever they do."""
        for process in self._processes:
            process.kill()
        self.close()

    def weights(self, dtype: str = "float32") -> dict[str, torch.Tensor]:
        """The gang's model by Hugging Face names."""
        layout, data = self.call("export", dtype=dtype)[0]
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return {
            e.name: flat[e.offset : e.offset + e.nbytes].view(getattr(torch, dtype)).view(e.shape)
            for e in layout.entries
        }

    def logprobs(self, batch: list[Sample]) -> list[np.ndarray]:
        """Of all samples, each from the replica that has it; its ranks must agree."""
        found: dict[int, np.ndarray] = {}
        for answer in self.call("logprobs", samples=batch):
            for index, values in answer.items():
                np.testing.assert_array_equal(found.setdefault(index, values), values)
        return [found[index] for index in range(len(batch))]

    def close(self) -> None:
        if self not in LIVING:
            return
        LIVING.remove(self)
        for rank in self._ranks:
            rank.close()
        for process in self._processes:
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()


def samples(count: int, *, seed: int = 0, longest: int = 24) -> list[Sample]:
    """Groups of two with prompts and completions of any length; some of an advantage of zero."""
    random = np.random.default_rng(seed)
    made = []
    for index in range(count):
        prompt, new = int(random.integers(2, 8)), int(random.integers(1, longest - 8))
        length = prompt + new
        mask = np.zeros(length, np.uint8)
        mask[prompt:] = 1
        value = 0.0 if index % 5 == 4 else float(random.normal())
        made.append(
            Sample(
                meta=bare_meta(index // 2, index % 2),
                tokens=random.integers(0, VOCABULARY, length).astype(np.int32),
                loss_mask=mask,
                behaviour_logprobs=near(random, mask),
                proximal_logprobs=near(random, mask),
                reference_logprobs=near(random, mask),
                versions=[VersionSpan(prompt, length, 1, 1)],
                reward=value,
                advantages=(mask * value).astype(np.float32),
            )
        )
    return made


def near(random: np.random.Generator, mask: np.ndarray) -> np.ndarray:
    """Log-probabilities about as large as those of a random model; float32 [T]."""
    return (-4.9 + 0.3 * random.normal(size=len(mask))).astype(np.float32) * mask


def check_digests(folder: Path, world: int) -> None:
    """Every rank has left the digest of its file, and a bit that is flipped in the last one's is found."""
    left = {path.name for path in folder.glob(f"*{DIGEST_SUFFIX}")}
    parts = [rank_file(folder, rank, world) for rank in range(world)]
    assert left == {path.name + DIGEST_SUFFIX for path in parts}
    found = collect_digests(folder)
    assert all(found[path.name] == digest_of(path) for path in parts) and "model.safetensors" in found
    verify_digests(folder, found)
    content = bytearray(parts[-1].read_bytes())
    content[-1] ^= 1
    parts[-1].write_bytes(content)
    with pytest.raises(Corrupt, match=f"{parts[-1].name} is not what was written"):
        verify_digests(folder, found)
