"""Episodes without a run: the tiny model's tokenizer, engines that say what they are told to, games."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from relax_rt.roles.agentic import Observation, Reply, Step, Task
from relax_rt.roles.agentic.episode import EpisodeChat, EpisodeLimits, Generate, ReplySampling
from relax_rt.roles.agentic.loading import EnvironmentFactory
from relax_rt.roles.agentic.tokens.ledger import TokenLedger
from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.models.tiny import character_tokenizer
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.rollout.router.core import GenerationRequest, Outcome
from relax_rt.transport.queue.ledger.messages import VersionSpan

TASK = Task(index=0, item="train-0", split="train", seed=7)


@cache
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(character_tokenizer(), Path("/nowhere"))


@cache
def template() -> ChatTemplate:
    return ChatTemplate(tokenizer())


class Engine:
    """Says what `words` makes of the prompt's text, and remembers what it was asked and what it said."""

    def __init__(self, words: Callable[[str], str]) -> None:
        self.words, self.asked, self.said = words, [], []  # type: ignore[var-annotated]
        self.version = 1

    async def generate(self, wanted: GenerationRequest) -> Outcome:
        tokens = [*tokenizer().encode(self.words(tokenizer().spell(wanted.prompt))), tokenizer().end_id]
        finish = "stop"
        if len(tokens) > wanted.max_new_tokens:
            tokens, finish = tokens[: wanted.max_new_tokens], "length"
        logprobs = [-0.001 * (len(self.said) + 1) * (n + 1) for n in range(len(tokens))]
        self.asked.append(wanted)
        self.said.append((tokens, logprobs))
        spans = [VersionSpan(0, len(tokens), self.version, self.version)]
        return Outcome(kind="done", finish_reason=finish, tokens=tokens, logprobs=logprobs, versions=spans)


class Count:
    """Asks for the numbers up to `last`, one a turn; half a point for each right one."""

    def __init__(self, last: int = 3) -> None:
        self.last, self.at, self.closed = last, 1, 0

    async def reset(self, task: Task) -> Observation:
        return Observation(messages=[{"role": "user", "content": f"count to {self.last}"}], state="0")

    async def step(self, reply: Reply) -> Step:
        right = reply.text == str(self.at)
        self.at += 1
        return Step(
            messages="next", reward=0.5 * right, done=self.at > self.last, state=str(self.at - 1), info={"at": self.at}
        )

    async def close(self) -> None:
        self.closed += 1


def numbers(prompt: str) -> str:
    """The next number of a conversation of `Count`."""
    return str(prompt.count("<|assistant|>"))


def limits(**changes: Any) -> EpisodeLimits:
    values: dict[str, Any] = {"max_turns": 8, "max_new_tokens": 16, "turn_timeout_s": 60.0, "episode_timeout_s": 120.0}
    return EpisodeLimits(**{**values, **changes})


def talk(generate: Generate, max_tokens: int = 400, **changes: Any) -> EpisodeChat:
    ledger = TokenLedger(template(), max_tokens=max_tokens, session="s")
    sampling = ReplySampling(seed=3, temperature=1.0, stop_ids=tokenizer().stop_ids, session="s")
    return EpisodeChat(ledger, generate, limits(**changes), sampling)


def factory(make: Callable[[], Any], *, plays: bool = False) -> EnvironmentFactory:
    return EnvironmentFactory("test", make, blocking=False, plays=plays)
