"""Checks of an environment with model, data and user code: it is loaded, and one held-out task is started."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_rt.config.problems import Problem
from relax_rt.config.schema import RunConfig
from relax_rt.roles.agentic.interface import Observation, conversation, media
from relax_rt.roles.agentic.loading import Factory, load_factory
from relax_rt.roles.agentic.rewards import KEY, PLACE, reward_table
from relax_rt.roles.agentic.settings import EnvSettings, chat_format_of, env_settings
from relax_rt.roles.agentic.tasks import first_task
from relax_rt.roles.agentic.tokens.images import ingest_images
from relax_rt.roles.agentic.tokens.ledger import TokenLedger
from relax_rt.roles.agentic.tokens.parsers import AUTO
from relax_rt.roles.agentic.tokens.template import load_chat_template
from relax_rt.roles.agentic.workers import open_pool
from relax_rt.roles.base.user_code import user_line
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.models.cache import say
from relax_rt.roles.rewards.dry_run import dry_run, task_of
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.transport.rpc.errors import RelaxError

if TYPE_CHECKING:
    from relax_rt.roles.agentic.tokens.template import ChatTemplate
    from relax_rt.roles.models.tokenizer import ChatTokenizer

TEXT_ALONE = "the model, its engines and its trainer take text alone"
NO_MORE = "the model takes texts and images, its engines and its trainer no more"
HINT = "show text: gymnasium's adapter without pixels, or a description of what is there; or train a model that sees"
UNSEEN = (
    "set roles.env.chat_template to one that does; or describe them in the messages, and set tool_parser to how calls "
    "are written"
)
TEMPLATE = "set roles.env.chat_template to one that does, or put it into the model's folder as chat_template.jinja"
ANY_NUMBER = 1 << 40
OPTION = re.compile(r"roles\.env\.(\w+)(?:\.(\w+))?")


def preflight_environment(
    config: RunConfig, config_dir: Path, tokenizer: ChatTokenizer | None, context: int | None
) -> Iterator[Problem]:
    """Check the environment itself: load it and start one held-out task where it will be played.

    Args:
        context: of the model, in tokens, if it is known.
    """
    table = env_settings(config)
    assert table is not None
    if context is not None and table.max_tokens > context:
        message = f"max_tokens = {table.max_tokens}, and the model's context is {context}"
        yield Problem((*PLACE, "max_tokens"), message, "lower it")
    try:
        factory = load_factory(table.environment, table.options, config_dir)
    except RelaxError as error:
        yield _problem(error)
        return
    if table.workers == 0 and factory.blocking:
        message = f"the methods of {table.environment} are not async, so that they would stop the role: workers = 0"
        yield Problem((*PLACE, "workers"), message, "leave it out, or make reset and step async")
    group_size = config.table(AlgorithmTable).group_size
    if group_size % factory.seats:
        message = f"{table.environment} has {factory.seats} seats, each a member of the group, and group_size is "
        yield Problem(
            ("algorithm", "group_size"),
            f"{message}{group_size}",
            "a multiple of the seats",
        )
    if tokenizer is not None:
        if factory.plays:
            # The program chooses what it sends, so these are only warnings.
            chat = load_chat_template(Path(config.config_dir), tokenizer, chat_format_of(config))
            for fault in chat.shortcomings(tools=True, turns=True):
                cost = "the gateway's calls that send it are refused" if fault.raises else "it is left out of prompts"
                say(f"warning: the model's chat template cannot render {fault.why}; {cost}")
        else:
            yield from _start_episode(config, table, factory, tokenizer)
        yield from _try_rewards(config, table, config_dir, tokenizer)


def _try_rewards(
    config: RunConfig, table: EnvSettings, config_dir: Path, tokenizer: ChatTokenizer
) -> Iterator[Problem]:
    """Call the reward components on replies to the first held-out task."""
    rewards = reward_table(config)
    if rewards is None:
        return
    try:
        items = [first_task(config, table, tokenizer)]
    except RelaxError as error:
        yield _problem(error)
        return

    def about(completion: str) -> dict[str, Any]:
        turns = [{"role": "user", "text": items[0].question or "…"}, {"role": "assistant", "text": completion}]
        return {"reward": 0.5, "turns": turns}

    yield from dry_run(rewards, config_dir, items, task_of(config.table(DataTable)), PLACE, KEY, about)


def _start_episode(
    config: RunConfig, table: EnvSettings, factory: Factory, tokenizer: ChatTokenizer
) -> Iterator[Problem]:
    chat_format = chat_format_of(config)
    try:
        seen = asyncio.run(_first_observation(config, table, factory, tokenizer))
        chat = load_chat_template(Path(config.config_dir), tokenizer, chat_format)
        if kind := media(conversation(seen.messages), has_vision=chat.image_processor is not None):
            takes = TEXT_ALONE if chat.image_processor is None else NO_MORE
            yield Problem((*PLACE, "environment"), f"{table.environment} shows parts of type '{kind}': {takes}", HINT)
            return
        if seen.tools and chat_format.tool_parser == AUTO and not chat.shows(seen.tools):
            message = f"{table.environment} offers tools, and the model's chat template does not show them"
            yield Problem((*PLACE, "environment"), message, UNSEEN)
        for fault in chat.shortcomings(tools=bool(seen.tools), turns=table.max_turns > 1):
            message = f"{table.environment}: the model's chat template cannot render {fault.why}"
            if fault.raises:
                yield Problem((*PLACE, "environment"), f"{message}; an episode would end there", TEMPLATE)
            else:
                say(f"warning: {message}; where a history is rendered again, it differs from what was sampled")
        tokens = asyncio.run(_first_prompt(chat, seen, table))
    except RelaxError as error:
        yield _problem(error)
        return
    if len(tokens) >= table.max_tokens:
        message = f"max_tokens = {table.max_tokens}, and an episode begins with {len(tokens)} tokens"
        yield Problem((*PLACE, "max_tokens"), message, "raise it")


async def _first_prompt(chat: ChatTemplate, seen: Observation, table: EnvSettings) -> tuple[int, ...]:
    """Return the tokens that an episode starts with, however many these are."""
    ledger = TokenLedger(chat, max_tokens=ANY_NUMBER, max_media_bytes=table.media_kib << 10)
    return ledger.prompt(
        await ingest_images(conversation(seen.messages), ledger.image_processor, ledger.add_image), seen.tools
    ).tokens


async def _first_observation(
    config: RunConfig, table: EnvSettings, factory: Factory, tokenizer: ChatTokenizer
) -> Observation:
    """Return the first observation of the first held-out task.

    Raises:
        RelaxError: what the environment raised, or that it did not return in time.
    """
    task = first_task(config, table, tokenizer)
    environment: Any
    if (workers := open_pool(table, factory, config.config_dir, size=1)) is not None:
        async with workers as pool:
            environment = await pool.environment("the first held-out task")
            found = await environment.reset(task)
            await environment.close()
    else:
        what = f"roles.env.environment = {table.environment!r}"
        try:
            async with asyncio.timeout(table.turn_timeout_s):
                environment = factory.make()
                found = await environment.reset(task)
                closed = getattr(environment, "close", lambda: None)()
                if inspect.isawaitable(closed):
                    await closed
        except TimeoutError:
            raise RelaxError(what, why=f"reset did not return within {table.turn_timeout_s:g} s") from None
        except Exception as error:
            why = f"reset raised {type(error).__name__}: {error} at {user_line(error)}"
            raise RelaxError(what, why=why, hint="mend it: no episode could begin") from error
    seen = Observation(messages=found) if isinstance(found, str) else found
    if not isinstance(seen, Observation):
        why = f"reset returned {found!r:.80}, which is no Observation and no text"
        raise RelaxError(f"roles.env.environment = {table.environment!r}", why=why)
    return seen


def _problem(error: RelaxError) -> Problem:
    """Return an error as a problem of the key that it names, else of the environment."""
    named = OPTION.match(error.what)
    path = (*PLACE, *(part for part in named.groups() if part)) if named else (*PLACE, "environment")
    return Problem(path, error.what + (f": {error.why}" if error.why else ""), error.hint)
