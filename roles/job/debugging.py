"""Debug environments and rewards in one process, where breakpoints work.

Nothing is started: no supervisor, no worker, no queue. What the user's code raises is raised to the caller, from the
user's own line; nothing has a deadline, so that a debugger may stop anywhere.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from relax_rt.config.loader import load_config
from relax_rt.roles.agentic.interface import EnvironmentFailed
from relax_rt.roles.agentic.loading import load_factory
from relax_rt.roles.agentic.settings import chat_format_of, env_settings
from relax_rt.roles.agentic.tasks import DataTasks, SeedTasks
from relax_rt.roles.agentic.tokens.template import load_chat_template
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.data.order import sample_seed
from relax_rt.roles.data.source import PromptSource
from relax_rt.roles.evaluation.sampling import SEED_DOMAIN
from relax_rt.roles.models.tokenizer import load_tokenizer
from relax_rt.roles.rewards.compose import combine, components_of
from relax_rt.roles.rewards.dry_run import offered_info, task_of
from relax_rt.roles.rewards.scoring import PER_COMPLETION, SCORE, RewardFailed, RewardRequest, parse_score
from relax_rt.roles.rewards.worker import load_function, task_verifier
from relax_rt.roles.rollout.engines.base import Assembly, GroupRequest
from relax_rt.roles.rollout.engines.settings import RolloutSettings
from relax_rt.roles.rollout.router.core import GenerationRequest, Outcome
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import RelaxError

if TYPE_CHECKING:
    from relax_rt.roles.agentic.episode import PlayedEpisode
    from relax_rt.roles.agentic.tasks import Tasks
    from relax_rt.roles.models.tokenizer import ChatTokenizer
    from relax_rt.roles.rewards.scoring import Score
    from relax_rt.roles.rewards.settings import RewardTable
    from relax_rt.roles.rollout.engines.base import Chunk, Completion
    from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine

Split = Literal["train", "held_out"]
Words = Callable[[str], str] | Sequence[str]
FOREVER_S = 30 * 86400.0
CLOSE_S = 5.0


@dataclass(frozen=True)
class DebugResult:
    """An answered prompt or a played episode, with its reward.

    Attributes:
        item: its id. split: train or held_out.
        turns: the conversation as the policy had it, special tokens included: (role, text), branch after branch.
        reward: what is trained on. rewards: its parts by name, unweighted.
        turn_rewards: of each reply, where it is an episode.
        truncated: cut by length, turns or tokens.
        tokens: sampled ones.
        info: what the environment reports.
    """

    item: str
    split: str
    turns: list[tuple[str, str]]
    reward: float
    rewards: dict[str, float]
    turn_rewards: list[float]
    truncated: bool
    tokens: int
    info: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        said = "\n".join(f"[{role}] {text}" for role, text in self.turns)
        parts = ", ".join(f"{name} {value:g}" for name, value in self.rewards.items())
        cut = ", truncated" if self.truncated else ""
        return (
            f"{self.item} ({self.split})\n{said}\nreward {self.reward:g} ({parts}){cut}, {self.tokens} tokens sampled"
        )


class Debug:
    """Plays single prompts or episodes of a roles.toml in this process: ``Runtime.from_toml(…, debug=True)``.

    It works on the loop that runs, a notebook's too. The model is loaded when the first reply is wanted of it.

    Args:
        config: roles.toml.
        overrides: ``a.b=c`` pairs put over it, as `--set`.
    """

    def __init__(self, config: str | Path, overrides: Sequence[str] = ()) -> None:
        self._path, self._overrides = Path(config), tuple(overrides)
        self.config: RLConfig
        self.tokenizer: ChatTokenizer
        self._source: PromptSource
        self._tasks: Tasks
        self._model: LocalModel | None = None

    async def __aenter__(self) -> Debug:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Read the config and what its prompts or tasks are. No user code is run yet.

        Raises:
            BadInput: something is wrong with the config. RelaxError: or with the model's tokenizer or the data.
        """
        await asyncio.to_thread(self._load)

    def _load(self) -> None:
        from relax_rt.roles.job.preflight import NEEDED
        from relax_rt.roles.models.resolve import resolve_model

        config = load_config(self._path, self._overrides)
        if not isinstance(config, RLConfig):
            raise RelaxError(f"debugging {self._path}", why="it is no job of prompts or environments")
        if lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
            raise RelaxError(f"not installed: {', '.join(lacking)}", hint="pip install relax-rt[cpu], or relax-rt[gpu]")
        self.config, folder = config, Path(config.config_dir)
        self.tokenizer = load_tokenizer(resolve_model(config.model.path, folder))
        env = env_settings(config)
        if env is not None and env.tasks is not None:
            self._tasks = SeedTasks(env.tasks)
            return
        self._source = PromptSource.load(config.data, self.tokenizer, seed=config.run.seed, config_dir=folder)
        self._tasks = DataTasks(self._source)

    async def close(self) -> None:
        """Release the model."""
        if self._model is not None:
            await self._model.close()
            self._model = None

    async def play(
        self, index: int = 0, *, split: Split = "train", words: Words | None = None, member: int = 0
    ) -> DebugResult:
        """Answer one prompt or play one episode, and reward it, all in the calling task.

        Args:
            index: place in the run's order of training prompts or tasks, or among the held-out ones.
            words: who speaks instead of the model: texts, one for each reply, or a function from what the policy sees,
                as text, to its reply.
            member: of the group; it decides the seed, which is the run's.

        Raises:
            Whatever the user's code raises, as it is. RelaxError: what the runtime would say of it, as of a step that
            returns nonsense.
        """
        seed = sample_seed(self.config.run.seed, index, member, 0) | (SEED_DOMAIN if split == "held_out" else 0)
        generate = self._of_the_model if words is None else Scripted(self.tokenizer, words)
        if env_settings(self.config) is None:
            return await self._answer(index, split, seed, generate)
        return await self._episode(index, split, seed, generate)

    # --- prompts

    async def _answer(
        self, index: int, split: Split, seed: int, generate: Callable[[GenerationRequest], Any]
    ) -> DebugResult:
        held_out = split == "held_out"
        item = _one_of(self._source.held_out, index) if held_out else self._source.prompt(index)
        temperature = self.config.evaluation.temperature if held_out else self.config.sampling.temperature
        outcome: Outcome = await generate(
            GenerationRequest(
                prompt=tuple(item.tokens),
                seed=seed,
                temperature=temperature,
                max_new_tokens=self.config.sampling.max_new_tokens,
                stop_ids=self.tokenizer.stop_ids,
                timeout_s=FOREVER_S,
            )
        )
        cut = outcome.finish_reason == "length"
        about = {"item": item.item, "split": item.split, "finish_reason": outcome.finish_reason, "truncated": cut}
        info = offered_info(item.question, item.metadata, None, **about, tokens=len(outcome.tokens), turns=[])
        if self.config.reward.judge is not None:
            why = "its verdict comes from engines of another model"
            raise RelaxError("debugging a reward with a judge", why=why, hint="`relax-rt sample` asks the judge")
        request = RewardRequest(self.tokenizer.decode(outcome.tokens), item.answer, info)
        score = await score_here(self.config, self.config.reward, request)
        turns = [("prompt", self.tokenizer.spell(item.tokens)), ("assistant", self.tokenizer.spell(outcome.tokens))]
        return DebugResult(
            item.item, item.split, turns, score.total, score.components, list(score.turns), cut, len(outcome.tokens)
        )

    # --- episodes

    async def _episode(
        self, index: int, split: Split, seed: int, generate: Callable[[GenerationRequest], Any]
    ) -> DebugResult:
        from relax_rt.roles.agentic.player import Player
        from relax_rt.roles.agentic.rewards import reward_table

        table = env_settings(self.config)
        assert table is not None
        task = _one_of(self._tasks.held_out(index + 1), index) if split == "held_out" else self._tasks.train(index)
        factory = load_factory(table.environment, table.options, Path(self.config.config_dir))
        if factory.program is not None:
            why = "a program has a process of its own, and speaks to the gateway of a run"
            hint = "start it by hand beside a run (docs/guides/programs.md, By hand)"
            raise RelaxError(f"debugging {table.environment}", why=why, hint=hint)
        added = reward_table(self.config)
        patient = table.model_copy(update={"turn_timeout_s": FOREVER_S, "episode_timeout_s": FOREVER_S})
        player = Player(
            factory=factory,
            pool=None,
            chat=load_chat_template(
                Path(self.config.config_dir), self.tokenizer, chat_format_of(self.config), warnings.warn
            ),
            generate=generate,
            settings=patient,
            sampling=self.config.sampling,
            stop_ids=self.tokenizer.stop_ids,
            lag=lambda oldest: 0,
            on_tokens=lambda tokens: None,
            rewards=None if added is None else lambda request: score_here(self.config, added, request),
        )
        temperature = self.config.evaluation.temperature if split == "held_out" else None
        try:
            played = await player.play(f"{split} {index}", task, seed, temperature=temperature)
            return self._result(task.item, task.split, played)
        except EnvironmentFailed as error:
            # As it was raised, for a debugger to stand at the user's own line.
            raised = error.__cause__ or error
        raise raised

    def _result(self, item: str, split: str, played: PlayedEpisode) -> DebugResult:
        branches = played.episode.branches
        spell = self.tokenizer.spell
        return DebugResult(
            item,
            split,
            [(turn.role, spell(branch.tokens[turn.start : turn.end])) for branch in branches for turn in branch.turns],
            played.reward,
            played.parts or {"episode": played.reward},
            list(played.rewards.values()),
            bool(played.truncated),
            sum(sum(branch.loss_mask) for branch in branches),
            played.info,
        )

    async def _of_the_model(self, wanted: GenerationRequest) -> Outcome:
        if self._model is None:
            self._model = LocalModel(self.config)
            await self._model.start()
        return await self._model.generate(wanted)


async def score_here(config: RLConfig, table: RewardTable, request: RewardRequest) -> Score:
    """Return a completion's reward; functions are called in this task, without a deadline, and their errors raised.

    Raises:
        ValueError: one returned no reward.
    """
    components, found = components_of(table), []
    for one in components:
        function = load_function(one.function, Path(config.config_dir))
        info = _info_for(request, task_verifier(task_of(config.data)), group=one.function.group)
        value = function.call([request.completion] if one.function.group else request.completion, request.answer, info)
        value = await value if inspect.isawaitable(value) else value
        if (close := getattr(function.function, "aclose", None)) is not None:
            await close()
        found.append(parse_score(value[0] if one.function.group else value))
    score = combine(components, found)
    assert not isinstance(score, RewardFailed)
    return score


def _info_for(
    request: RewardRequest, verify: Callable[[str, dict[str, Any]], float] | None, *, group: bool
) -> dict[str, Any]:
    info = dict(request.info)
    if verify is not None:
        info[SCORE] = lambda text: verify(text, request.info.get("metadata", {}))
    return {name: [value] if group and name in PER_COMPLETION else value for name, value in info.items()}


class Scripted:
    """An engine that replies with given texts, as tokens of the policy."""

    def __init__(self, tokenizer: ChatTokenizer, words: Words) -> None:
        self._tokenizer, self._words = tokenizer, words
        self._said = 0

    async def __call__(self, wanted: GenerationRequest) -> Outcome:
        words, number = self._words, self._said
        self._said += 1
        if callable(words):
            text = words(self._tokenizer.spell(wanted.prompt))
        elif number < len(words):
            text = words[number]
        else:
            why = f"the policy is asked for reply {number + 1}, and there are {len(words)}"
            raise RelaxError("words", why=why, hint="give more of them, or a function")
        tokens, finish = [*self._tokenizer.encode(text), self._tokenizer.end_id], "stop"
        if len(tokens) > wanted.max_new_tokens:
            tokens, finish = tokens[: wanted.max_new_tokens], "length"
        versions = [VersionSpan(0, len(tokens), 1, 1)]
        return Outcome(
            kind="done", finish_reason=finish, tokens=tokens, logprobs=[0.0] * len(tokens), versions=versions
        )


class LocalModel:
    """The model before its first step, in this process."""

    def __init__(self, config: RLConfig) -> None:
        self._config = config
        self._engine: EmbeddedEngine
        self._assembly: Assembly
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._asked = 0

    async def start(self) -> None:
        """Load the model.

        Raises:
            RelaxError: it cannot be loaded.
        """
        from relax_rt.roles.models.resolve import resolve_model
        from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine

        table = self._config.role("rollout", RolloutSettings)
        folder = resolve_model(self._config.model.path, Path(self._config.config_dir))
        most, threads = table.max_sequences, table.threads
        try:
            self._engine = await asyncio.to_thread(
                EmbeddedEngine, folder, dtype=table.dtype, max_sequences=most, threads=threads
            )
        except (OSError, ValueError) as error:
            raise RelaxError(f"the model {folder} cannot be loaded", why=str(error).splitlines()[0]) from error
        self._assembly = Assembly()
        await self._engine.start(self._arrive, self._fail)

    async def generate(self, wanted: GenerationRequest) -> Outcome:
        """Generate one reply.

        Raises:
            Refused: the model cannot take it. Whatever ended the engine.
        """
        self._asked += 1
        request = GroupRequest(
            id=self._asked,
            prompt=wanted.prompt,
            seeds=(wanted.seed,),
            temperature=wanted.temperature,
            max_new_tokens=wanted.max_new_tokens,
            stop_ids=wanted.stop_ids,
            media=wanted.media,
        )
        done = self._waiting[request.id] = asyncio.get_running_loop().create_future()
        self._assembly.expect(request)
        try:
            self._engine.submit([request])
            found = await done
        finally:
            del self._waiting[request.id]
        return Outcome(
            kind="done",
            finish_reason=found.finish_reason,
            tokens=found.tokens,
            logprobs=found.logprobs,
            versions=found.versions,
        )

    def _arrive(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            one = self._assembly.add(chunk)
            if one is not None and one.request in self._waiting and not self._waiting[one.request].done():
                self._waiting[one.request].set_result(one)

    def _fail(self, error: BaseException) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close(CLOSE_S)


def _one_of(found: Sequence[Any], index: int) -> Any:
    if not 0 <= index < len(found):
        raise RelaxError(f"held-out item {index}", why=f"there are {len(found)}")
    return found[index]
