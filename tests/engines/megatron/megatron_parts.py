"""Gangs of real ranks that tests drive, the models that they train, and samples."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relax_rt.roles.sample import Sample, SampleMeta
from relax_rt.transport.queue.api import VersionSpan

HERE = Path(__file__).parent
CALL_S = 120.0
VOCABULARY = 131
"""Odd, so that it is padded where it is cut."""


class Gang:
    """Processes that call collectives together. Starting one costs seconds: it serves many tests."""

    def __init__(self, world: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gang-")
        address = f"{self._folder.name}/s"
        listener = Listener(address, "AF_UNIX")
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "far_end.py"), address, str(rank), str(world), self._folder.name], env=env
            )
            for rank in range(world)
        ]
        found: dict[int, Connection] = {}
        for _ in range(world):
            connection = listener.accept()
            found[connection.recv()] = connection
        listener.close()
        self._ranks = [found[rank] for rank in range(world)]

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
        for rank in self._ranks:
            rank.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()


COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def save_model(folder: Path, family: str) -> Path:
    """A small random model in Hugging Face format, float32; norms and biases are not what they start from."""
    import transformers

    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}
    made: dict[str, Any] = {
        "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
        "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
        "llama": ("Llama", {"tie_word_embeddings": True, "attention_bias": False}),
        "qwen3_moe": (
            "Qwen3Moe",
            {
                "head_dim": 16,
                "tie_word_embeddings": False,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [0],
            },
        ),
    }
    name, rest = made[family]
    config = getattr(transformers, f"{name}Config")(**COMMON, **rope, **rest)
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


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
                meta=_meta(index),
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


def _meta(index: int) -> SampleMeta:
    return SampleMeta(
        group=index // 2,
        member=index % 2,
        prompt=index // 2,
        attempt=0,
        item="",
        split="train",
        finish_reason="stop",
        truncated=False,
        sampling={},
        tokenizer_digest="",
        template_digest="",
        turns=[],
    )
