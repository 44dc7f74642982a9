"""`package:tiny`: a 0.8M-parameter Qwen3 that adds two numbers rightly about a quarter of the time.

Made for tests and for trying a config out: it starts where GRPO has something to reinforce, and a step takes a
fraction of a second on one core. Its question is `{a} + {b} =` with both from 0 to 100, the answer the bare sum.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from relax_rt.roles.data.split.canonical import in_held_out
from relax_rt.roles.models.cache import say
from relax_rt.transport.rpc.errors import RelaxError

FOLDER = "tiny-qwen3-2"
"""The number grows whenever a change here would make other weights or another tokenizer."""

SPECIALS = ("<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|unk|>")
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONTEXT = 512
UNSEEN = 0.2
"""Share of the questions kept out of the warm start, by the same hash that chooses held-out questions: a run on
reasoning-gym's basic_arithmetic with held_out up to this share evaluates on questions the model never saw."""
TARGET, GIVE_UP_STEPS = 0.22, 2000
"""The warm start ends at this probability of a right sampled answer, or fails after so many steps."""
FIRST_CHECK = 200
"""No seed came near the target before; a check takes as long as four steps."""
BATCH = 32


def build(folder: Path) -> None:
    """Write tokenizer and warm-started model as a Hugging Face folder. One thread, under a minute.

    Raises:
        RelaxError: the warm start did not reach its target (an unusual torch build).
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = character_tokenizer()
    start = time.monotonic()
    say("warm-starting the tiny model on two-digit addition, once (about 30 s on one core)")
    model, steps, accuracy = _warm_start(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    seconds = time.monotonic() - start
    (folder / "warm_start.json").write_text(json.dumps({"steps": steps, "accuracy": accuracy, "seconds": seconds}))
    say(f"the tiny model adds rightly {accuracy:.0%} of the time after {steps} steps, {seconds:.0f} s")


def character_tokenizer() -> Any:
    """Return one token a printable ASCII character; roles of the chat template are single tokens; `<|end|>` ends a
    turn."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_model(vocabulary: int, seed: int) -> Any:
    """Return the model with fresh weights; leaves torch's global generator as it was."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    ends = {"pad_token_id": SPECIALS.index("<|pad|>"), "eos_token_id": SPECIALS.index("<|end|>"), "bos_token_id": None}
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        **ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    return model


def _questions() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs for the warm start and pairs kept out of it, each in a fixed order."""
    pairs = [(a, b) for a in range(101) for b in range(101)]
    pairs.sort(key=lambda pair: hashlib.blake2b(repr(pair).encode()).digest())
    unseen = [pair for pair in pairs if in_held_out(f"Calculate {pair[0]} + {pair[1]}.", UNSEEN)]
    kept_out = set(unseen)
    return [pair for pair in pairs if pair not in kept_out], unseen


def _encode(tokenizer: Any, pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens int64 [n, T] padded on the right, and labels [n, T], -100 except on the answer and its end."""

    turns = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{a} + {b} ="}], tokenize=False, add_generation_prompt=True
        )
        for a, b in pairs
    ]
    prompts = tokenizer(turns, add_special_tokens=False)["input_ids"]
    answers = tokenizer([f"{a + b}<|end|>" for a, b in pairs], add_special_tokens=False)["input_ids"]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    tokens = torch.zeros(len(pairs), width, dtype=torch.long)
    labels = torch.full((len(pairs), width), -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return tokens, labels


def _right_answer_probability(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean probability that sampling at temperature 1 gives exactly the right answer and then ends."""

    with torch.no_grad():
        logprobs = model(tokens).logits[:, :-1].log_softmax(-1)
    wanted = labels[:, 1:]
    chosen = logprobs.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    return float((chosen * (wanted >= 0)).sum(1).exp().mean())


def _warm_start(tokenizer: Any) -> tuple[Any, int, float]:
    """Supervised training until TARGET. The same torch build makes the same weights every time."""

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seen, unseen = _questions()
        model = tiny_model(len(SPECIALS) + len(CHARACTERS), seed=0)
        tokens, labels = _encode(tokenizer, seen)
        check = _encode(tokenizer, unseen[:256])
        # Sums with a one-digit number teach the carry; without them the loss plateaus for twice as long.
        easy = [row for row, pair in enumerate(seen) if min(pair) < 10]
        draw = random.Random(0)
        update = _optimizers(model)
        for step in range(1, GIVE_UP_STEPS + 1):
            rows = draw.choices(easy, k=BATCH // 2) + draw.choices(range(len(seen)), k=BATCH - BATCH // 2)
            wanted = labels[rows][:, 1:]
            hidden = model.model(tokens[rows]).last_hidden_state[:, :-1][wanted >= 0]
            loss = torch.nn.functional.cross_entropy(model.lm_head(hidden), wanted[wanted >= 0])
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update(min(1.0, step / 20))
            if step >= FIRST_CHECK and step % 10 == 0:
                accuracy = _right_answer_probability(model, *check)
                if accuracy >= TARGET:
                    return model, step, accuracy
                if step % 50 == 0:
                    say(f"warm start: step {step}, right {accuracy:.1%} of the time")
    finally:
        torch.set_num_threads(threads)
    raise RelaxError(
        "the warm start of package:tiny", why=f"{GIVE_UP_STEPS} steps did not reach {TARGET:.0%} right answers"
    )


def _optimizers(model: Any) -> Callable[[float], None]:
    """Muon for the matrices, AdamW for embedding and norms.

    Muon (arXiv 2502.16982) leaves the plateau before the carry is learnt in a third of AdamW's steps.

    Returns:
        Applies the gradients, at this part of the full learning rates.
    """

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    muon = Muon(matrices, weight_decay=0.01)
    adam = torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.01)

    def update(part: float) -> None:
        muon.step(0.02 * part)
        adam.param_groups[0]["lr"] = 3e-3 * part
        adam.step()
        model.zero_grad()

    return update


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration (https://kellerjordan.github.io/posts/muon)."""
ITERATIONS = 5
MOMENTUM = 0.95


class Muon:
    """Muon: Nesterov momentum with orthogonalised update matrices (arXiv 2502.16982).

    `torch.optim.Muon` orthogonalises in bfloat16, whatever the dtype of the weights: on a CPU without bfloat16
    instructions the warm start took 489 s instead of 30 s. Matrices of one shape are batched.
    """

    def __init__(self, matrices: Iterable[torch.nn.Parameter], *, weight_decay: float) -> None:
        self._weight_decay = weight_decay
        alike: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            alike[matrix.shape].append(matrix)
        self._groups = [(group, torch.zeros(len(group), *shape)) for shape, group in alike.items()]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply the gradients, which every matrix must have."""
        for matrices, momentum in self._groups:
            gradients = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])
            momentum.lerp_(gradients, 1 - MOMENTUM)
            updates = orthogonal(gradients.lerp(momentum, MOMENTUM))
            rows, columns = momentum.shape[1:]
            for matrix, update in zip(matrices, updates, strict=True):
                matrix.mul_(1 - learning_rate * self._weight_decay)
                matrix.add_(update, alpha=-learning_rate * math.sqrt(max(1.0, rows / columns)))


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices with the same singular vectors and singular values of about 1 (0.7 to 1.2).

    Args:
        matrices: [n, rows, columns].
    """
    tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if tall else matrices
    # The spectral norm must be at most 1, and is at most Frobenius' norm.
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if tall else found
