"""Answers calls: prompt from the session's ledger, tokens from an engine, answer back through the ledger."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from hashlib import blake2b
from typing import Literal, Protocol

import msgspec

from relax_rt.roles.agentic.tokens.images import new_images, process_images, replace_images
from relax_rt.roles.agentic.tokens.ledger import TokenLedger, budget_exhausted
from relax_rt.roles.agentic.tokens.types import PromptPlan, Reply, Sampled
from relax_rt.roles.data.media.image_processor import ImageProcessor, ProcessedImage
from relax_rt.roles.gateway.calls import (
    Answer,
    AnswerSink,
    Call,
    CallError,
    Choice,
    Head,
    Message,
    bad_request,
    image_refused,
)
from relax_rt.roles.gateway.reading import AnswerReader, SampledTokens, tokens_before
from relax_rt.roles.gateway.sessions import Session, StreamedAnswer, adopt_partial_answer
from relax_rt.roles.rollout.engines.routing import PART_TOKENS
from relax_rt.roles.rollout.router.admission import AdmissionQueue, AdmissionRejected
from relax_rt.roles.rollout.router.core import Deliver, GenerationRequest, Outcome
from relax_rt.roles.rollout.router.router import NotGenerated
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Refused, RelaxError

ID_BYTES = 12
CHUNK_TOKENS, LARGE_CHUNK_TOKENS = 8, 32
"""Tokens of an engine's update: if somebody looks at them, and if only the end matters."""
LONG_BYTES = 16_384
"""Requests from this size on are rendered in a thread: other callers would notice the time that it takes."""
CHARACTERS_A_TOKEN = 64
"""A text with more characters for each token of room is refused without rendering it. Text and code have about four
characters a token; long runs of spaces have more."""
MAY_OPEN_REASONING = 64
"""Characters at a prompt's end in which the template may have opened the model's reasoning."""


class Generator(Protocol):
    """Generates tokens: a Router."""

    async def generate(self, wanted: GenerationRequest) -> Outcome:
        """Generate a sequence. Raises NotGenerated."""

    def stream(self, wanted: GenerationRequest) -> AsyncIterator[Deliver]:
        """Generate a sequence, in parts."""


class Tokenizer(Protocol):
    """The part of a ChatTokenizer that is used."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""

    def spell(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens written out."""


class AnswerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How calls are answered.

    Attributes:
        models: names of the model; "*" accepts any name.
        temperature: the run's.
        other_temperature: whether a trained session's call with another temperature is refused, or has the run's.
        unsupported: whether options that cannot be served are refused, or ignored and named in the answer's head.
        new_tokens: maximum of an answer. context: maximum of prompt and answer together.
        timeout_s: from a call's admission to its end.
        lag: see GenerationRequest. seed: of the run.
    """

    models: tuple[str, ...]
    temperature: float = 1.0
    other_temperature: Literal["refuse", "override"] = "refuse"
    unsupported: Literal["refuse", "ignore"] = "refuse"
    new_tokens: int = 1024
    context: int = 1 << 20
    timeout_s: float = 600.0
    lag: int = 1
    seed: int = 0


class ServedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer and what belongs to it.

    Attributes:
        versions: lowest and highest policy version of its tokens.
        plans: of the ledger, in case that the answer is not delivered. streamed: if it was streamed in a session.
    """

    answer: Answer
    versions: tuple[int, int]
    plans: tuple[PromptPlan, ...] = ()
    streamed: StreamedAnswer | None = None


class _Sequence(msgspec.Struct, kw_only=True):
    """One sequence to generate."""

    index: int
    prompt: tuple[int, ...]
    plan: PromptPlan | None
    seed: int
    echo: str = ""


class Service:
    """Answers calls.

    Args:
        generator: generates tokens. tokenizer: the model's.
        now: seconds since 1970.
        lag: publications from a version to the newest one.
        image_processor: of a vision-language model.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        admission: AdmissionQueue,
        policy: AnswerPolicy,
        now: Callable[[], float] = time.time,
        lag: Callable[[int], float] = lambda version: 0,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self.policy, self.admission, self._image_processor = policy, admission, image_processor
        self._generator, self._tokenizer, self._now, self._lag = generator, tokenizer, now, lag
        self.answered = self.failed = self.sampled = self.left = 0

    async def answer(self, call: Call, session: Session, request: str, sink: AnswerSink | None = None) -> ServedAnswer:
        """Answer a call. If it is cancelled, its sequences end, and nothing of it is trained on, unless a later call of
        the session continues from what its caller has seen.

        Args:
            request: id of the answer.

        Raises:
            CallError: it cannot be answered.
        """
        temperature, ignored = self._check(call, session)
        number = session.begin_call()
        task = asyncio.current_task()
        assert task is not None
        session.in_progress.add(task)
        plans: list[PromptPlan] = []
        streamed: StreamedAnswer | None = None
        try:
            sequences, messages = await self._prepare(call, session, number, plans)
            if sink is not None and session.trained and call.n == 1:
                streamed = StreamedAnswer(request, messages, call.tools, plans[0], sink.gone, may_call=call.may_call)
                session.streams.append(streamed)
            head = Head(
                id=request,
                created=int(self._now()),
                model=call.model,
                prompt_tokens=sum(len(one.prompt) for one in sequences[:: call.n]),
                reused_tokens=sum(plan.reused for plan in plans),
                ignored=(*ignored, *(["tools"] if any(plan.unseen for plan in plans) else [])),
            )
            job = _RunningCall(self, call, session, head, temperature, sink, streamed)
            choices = await self.admission.run(
                session.group, lambda pin: job.run(sequences, pin), sequences=len(sequences)
            )
            self.answered += 1
            session.answered += 1
            session.error, session.permanent = "", False
            if streamed is not None:
                streamed.counted, streamed.text = True, str(choices[0].message.get("content") or "")
            self.sampled += sum(choice.tokens for choice in choices)
            answer = Answer(head=head, choices=tuple(choices))
            return ServedAnswer(answer=answer, versions=job.versions, plans=tuple(plans), streamed=streamed)
        except BaseException as error:
            self.failed += 1
            for plan in plans:
                session.abandon(plan)
            reported = self._reported(error, session, streamed)
            if reported is error:
                raise
            raise reported from error
        finally:
            session.in_progress.discard(task)

    async def count(self, call: Call, session: Session) -> int:
        """Return the prompt tokens of a call, without answering it.

        Raises:
            CallError: it could not be answered.
        """
        self._check(call, session)
        plans: list[PromptPlan] = []
        await self._prepare(call, session, 0, plans)
        return len(plans[0].tokens)

    def undelivered(self, served: ServedAnswer, session: Session) -> None:
        """The client disconnected before the answer was delivered: nothing of it is trained on, unless the session
        continues from what the client has of it."""
        if served.streamed is not None and served.streamed.settled:
            return
        session.answered -= 1
        for plan in served.plans:
            session.abandon(plan)
        self._count_left(session, served.streamed)

    def _reported(self, error: BaseException, session: Session, streamed: StreamedAnswer | None) -> BaseException:
        """Return the error that a call ends with, and record it in the session."""
        settled = streamed is not None and streamed.settled
        if isinstance(error, asyncio.CancelledError):
            if session.ended:
                # Cancelled by the session's end, not by the client, which gets an answer.
                return CallError(409, f"session {session.name!r} {session.ended}", code="session_ended")
            if not settled:
                self._count_left(session, streamed)
        elif streamed is not None and streamed in session.streams:
            session.streams.remove(streamed)
        reported = error
        if isinstance(error, NotGenerated):
            late = error.outcome.kind == "late"
            status, code = (504, "late") if late else (503, "not_generated")
            reported = CallError(status, str(error), code=code, retry_after_s=1.0)
        elif isinstance(error, AdmissionRejected):
            reported = CallError(429, str(error), code="busy", retry_after_s=error.retry_after_s)
        elif isinstance(error, RelaxError):
            reported = CallError(503, str(error), code="not_generated", retry_after_s=1.0)
        if isinstance(reported, CallError) and (reported.status == 429 or reported.status >= 500) and not settled:
            session.error = reported.message
            # Engines that refused it, failed with it or lacked time would do so again.
            session.permanent = isinstance(error, NotGenerated) and (
                error.outcome.kind in ("refused", "failed") or error.outcome.slow
            )
        return reported

    def _count_left(self, session: Session, streamed: StreamedAnswer | None) -> None:
        if session.trained:
            self.left += 1
            session.left += 1
            if streamed is not None:
                streamed.left, streamed.counted = True, False

    # --- prompts

    def _check(self, call: Call, session: Session) -> tuple[float, tuple[str, ...]]:
        """Return the temperature that a call is sampled with, and which of its options are ignored.

        Raises:
            CallError: unknown model, an image for a text model, or something else that is refused here.
        """
        policy = self.policy
        if "*" not in policy.models and call.model not in policy.models:
            known = ", ".join(repr(name) for name in policy.models)
            message = f"there is no model {call.model!r} here, only {known}"
            raise CallError(404, message, param="model", code="model_not_found")
        if self._image_processor is None and (parts := new_images(call.messages)):
            raise image_refused(parts[0])
        ignored = [one.name for one in call.unsupported]
        if ignored and policy.unsupported == "refuse":
            first = call.unsupported[0]
            hint = f'leave out {", ".join(ignored)}, or set roles.gateway.unsupported = "ignore"'
            raise bad_request(f"{first.name}: {first.why} ({hint})", first.name, "unsupported_parameter")
        if call.prompts and session.trained:
            message = "a text prompt has no place in an episode's conversation: use chat completions"
            raise bad_request(message, "prompt", "unsupported_in_session")
        own = policy.temperature if session.limits.temperature is None else session.limits.temperature
        temperature = own if call.temperature is None else call.temperature
        if session.trained and temperature != own:
            if policy.other_temperature == "refuse":
                why = f"temperature = {temperature:g}: the run samples and trains at {own:g}"
                hint = 'leave it out, or set roles.gateway.temperature = "override"'
                raise bad_request(f"{why} ({hint})", "temperature", "unsupported_value")
            temperature = own
            ignored.append("temperature")
        return temperature, tuple(ignored)

    async def _prepare(
        self, call: Call, session: Session, number: int, plans: list[PromptPlan]
    ) -> tuple[list[_Sequence], list[Message]]:
        """Return a call's sequences, each with prompt and seed, and the conversation that they answer. Puts the
        ledger's plan into `plans`."""
        messages: list[Message] = []
        limit = min(call.max_tokens or self.policy.new_tokens, session.limits.new_tokens or self.policy.new_tokens)
        if call.prompts:
            return await self._prepare_prompts(call, session, number), messages
        images: list[ProcessedImage] = []
        if self._image_processor is not None and (parts := new_images(call.messages)):
            try:
                images = await process_images(parts, self._image_processor)
            except Refused as error:
                raise bad_request(str(error), "messages", "picture_refused") from error
        async with session.ledger() as ledger:
            session.check_open()
            if images:
                try:
                    shown = replace_images(call.messages, images, ledger.add_image)
                except Refused as error:
                    raise bad_request(str(error), "messages", "picture_refused") from error
                call = msgspec.structs.replace(call, messages=tuple(shown))
            plan = await _in_thread_if_long(call, lambda: self._plan(call, session, ledger, limit, messages), plans)
        self._check_room(plan.tokens, session)
        return [
            _Sequence(index=k, prompt=plan.tokens, plan=plan, seed=self._seed(call, session, number, k))
            for k in range(call.n)
        ], messages

    async def _prepare_prompts(self, call: Call, session: Session, number: int) -> list[_Sequence]:
        """Return the sequences of a call that has prompts instead of a conversation."""
        found: list[_Sequence] = []
        self._check_characters(call, session, self.policy.context)
        encode = self._tokenizer.encode
        for prompt in call.prompts:
            if isinstance(prompt, str):
                ids = tuple(encode(prompt) if call.nbytes < LONG_BYTES else await asyncio.to_thread(encode, prompt))
            else:
                ids = prompt
            self._check_room(ids, session)
            echo = (prompt if isinstance(prompt, str) else self._tokenizer.spell(ids)) if call.echo else ""
            for _ in range(call.n):
                k = len(found)
                seed = self._seed(call, session, number, k)
                found.append(_Sequence(index=k, prompt=ids, plan=None, seed=seed, echo=echo))
        return found

    def _plan(
        self, call: Call, session: Session, ledger: TokenLedger, limit: int, messages: list[Message]
    ) -> PromptPlan:
        """Plan the prompt with the ledger; puts the conversation into `messages`."""
        self._check_characters(call, session, min(ledger.max_tokens, self.policy.context))
        previous = session.reply(call.previous) if call.previous else None
        try:
            before = session.before(ledger, previous) if previous else []
            system: list[Message] = [{"role": "system", "content": call.instructions}] if call.instructions else []
            messages += [*system, *before, *call.messages]
            adopt_partial_answer(session, ledger, messages, self._tokenizer.spell)
            # With other instructions it is another conversation, whatever follows.
            named = None if system or session.instructed(previous) else previous
            return ledger.prompt(
                messages, call.tools, may_call=call.may_call, previous=named, n=call.n, max_new_tokens=limit
            )
        except Refused as error:
            if budget_exhausted(error):
                raise session.no_tokens(str(error)) from error
            raise bad_request(str(error), "messages", "conversation_refused") from error

    def _check_characters(self, call: Call, session: Session, room: int) -> None:
        """Refuse a call whose texts are far larger than the room in tokens, before they are rendered."""
        if (count := call.characters) > room * CHARACTERS_A_TOKEN:
            message = f"the call has {count} characters, and there is room for {room} tokens"
            raise session.no_tokens(message, 400, "context_length_exceeded")

    def _check_room(self, prompt: Collection[int], session: Session) -> None:
        if len(prompt) >= self.policy.context:
            message = f"the prompt has {len(prompt)} tokens, the model takes {self.policy.context} with the answer"
            raise session.no_tokens(message, 400, "context_length_exceeded")

    def _seed(self, call: Call, session: Session, number: int, k: int) -> int:
        """Derive a sequence's seed from the caller's.

        In an episode also from the call's number, which a replay repeats: a program that always asks with one seed
        would otherwise get the same answers in all members of a group.
        """
        if session.trained:
            of = session.limits.seed or session.name
            what = f"{self.policy.seed if call.seed is None else call.seed}/{of}/{number}/{k}"
        elif call.seed is not None:
            what = f"asked {call.seed}/{k}"
        else:
            return secrets.randbits(63)
        return int.from_bytes(blake2b(what.encode(), digest_size=8).digest(), "big") >> 1

    # --- sequences, for _RunningCall

    def reasoning_tokens(self, reply: Reply, tokens: Sequence[int]) -> int:
        """Count the tokens of an answer's reasoning, its opening marker included."""
        reasoning = str(reply.message.get("reasoning_content") or "")
        begin = reply.text.find(reasoning) if reasoning else -1
        return tokens_before(tokens, begin + len(reasoning), self._tokenizer.spell) if begin >= 0 else 0

    def reader(self, call: Call, prompt: Sequence[int]) -> AnswerReader:
        """Return a reader for an answer to this prompt."""
        end = self._tokenizer.spell(prompt[-16:])[-MAY_OPEN_REASONING:] if call.stream else ""
        return AnswerReader(
            self._tokenizer.spell,
            call.stop,
            self._tokenizer.stop_ids,
            held=end.rfind("<think>") > end.rfind("</think>"),
            calls=bool(call.tools) and call.may_call,
            logprobs=call.logprobs,
        )

    def generation_request(
        self, call: Call, session: Session, one: _Sequence, temperature: float, *, in_parts: bool
    ) -> GenerationRequest:
        """Return the request to the router for one sequence."""
        policy, limits = self.policy, session.limits
        room = policy.context - len(one.prompt)
        room = room if one.plan is None else min(room, one.plan.room)
        limit = min(call.max_tokens or policy.new_tokens, limits.new_tokens or policy.new_tokens, room)
        if limit < 1:
            raise session.no_tokens(f"session {session.name!r} has no tokens left for an answer")
        lag = policy.lag
        if limits.weights != "lag":
            # An answer as old as the episode's oldest token makes the episode no staler.
            behind = self._lag(session.oldest) if session.oldest and limits.weights == "episode" else 0
            lag = int(behind) if behind < float("inf") else 0
        if limits.routing:
            chunk_tokens = LARGE_CHUNK_TOKENS if in_parts else PART_TOKENS
        else:
            chunk_tokens = CHUNK_TOKENS if in_parts else LARGE_CHUNK_TOKENS
        return GenerationRequest(
            prompt=one.prompt,
            seed=one.seed,
            temperature=temperature,
            max_new_tokens=limit,
            stop_ids=self._tokenizer.stop_ids,
            timeout_s=policy.timeout_s,
            lag=lag,
            session=session.name if session.kept else "",
            prefix=not session.kept,
            chunk_tokens=chunk_tokens,
            routing=limits.routing,
            rows_from=0 if one.plan is None else one.plan.rows,
            media=() if one.plan is None else one.plan.media,
        )

    async def pieces(self, wanted: GenerationRequest, *, whole: bool) -> AsyncIterator[Deliver]:
        """Yield tokens as they come, or all at the end."""
        if not whole:
            async with aclosing(self._generator.stream(wanted)) as stream:  # type: ignore[type-var]
                async for piece in stream:
                    yield piece
            return
        done = await self._generator.generate(wanted)
        yield Deliver(0, 0, done.tokens, done.logprobs, done.versions, done.routing, done.prompt_routing)


class _RunningCall:
    """One admitted call; restarted as a whole after it was preempted."""

    def __init__(
        self,
        service: Service,
        call: Call,
        session: Session,
        head: Head,
        temperature: float,
        sink: AnswerSink | None,
        streamed: StreamedAnswer | None,
    ) -> None:
        self._service, self._call, self._session, self._streamed = service, call, session, streamed
        self._head, self._temperature, self._sink = head, temperature, sink
        self._begun = self._pinned = False
        self.versions = (0, 0)

    async def run(self, sequences: Sequence[_Sequence], pin: Callable[[], bool]) -> list[Choice]:
        """Generate all sequences at once."""
        self._pin, self.versions = pin, (0, 0)
        if len(sequences) == 1:
            return [await self._generate(sequences[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._generate(one, has_siblings=True)) for one in sequences]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return [task.result() for task in tasks]

    async def _generate(self, one: _Sequence, *, has_siblings: bool = False) -> Choice:
        """Generate one sequence. With siblings the call cannot be restarted once one of them is recorded."""
        service, call, sink, streamed = self._service, self._call, self._sink, self._streamed
        in_parts = sink is not None or bool(call.stop)
        wanted = service.generation_request(call, self._session, one, self._temperature, in_parts=in_parts)
        reader = service.reader(call, one.prompt)
        taken = streamed.restart() if streamed is not None else SampledTokens()
        reads = in_parts or call.logprobs or one.plan is None
        async with aclosing(service.pieces(wanted, whole=not in_parts)) as stream:  # type: ignore[type-var]
            async for piece in stream:
                count = reader.take(piece.tokens, piece.logprobs) if reads else len(piece.tokens)
                taken.add(piece, count)
                self._note_versions(piece.versions)
                if sink is not None and (text := reader.show()):
                    await self._begin(sink)
                    sink.text(one.index, (one.echo if reader.shown == text else "") + text)
                    if streamed is not None:
                        streamed.text = reader.shown
                if reader.stop is not None:
                    break
        reader.finish()
        stopped = reader.stop is not None or taken.tokens[-1] in wanted.stop_ids
        sampled = taken.until(len(taken.tokens), "stop" if stopped else "length")
        if has_siblings or sink is not None:
            await self._ensure_pinned()
        choice = await self._record(one, sampled, reader)
        if sink is not None:
            await self._begin(sink)
            sink.choice(choice)
        return choice

    async def _record(self, one: _Sequence, sampled: Sampled, reader: AnswerReader) -> Choice:
        """Record a completion in the session's ledger, and return it as the caller gets it."""
        session, finish = self._session, sampled.finish_reason
        if one.plan is None:
            reply = Reply(f"{self._head.id}-{one.index}", {"role": "assistant", "content": reader.visible}, finish, "")
            message = _visible_message(reply, reader)
        else:
            instructed = bool(self._call.instructions)
            async with session.ledger() as ledger:
                reply = session.sampled(ledger, one.plan, sampled, one.index)
                message = _visible_message(reply, reader)
                session.remember(ledger, self._head.id, reply, message, choice=one.index, instructed=instructed)
        calls = reply.finish_reason == "tool_calls"
        return Choice(
            index=one.index,
            reply=reply.id,
            message=message,
            text=one.echo + reader.visible,
            finish_reason="tool_calls" if calls else "stop" if finish == "stop" else "length",
            stop=reader.stop,
            tokens=len(sampled.tokens),
            reasoning_tokens=self._service.reasoning_tokens(reply, sampled.tokens),
            logprobs=tuple(reader.tokens),
        )

    async def _ensure_pinned(self) -> None:
        """Exclude the call from preemption. If it was just preempted, wait for the cancellation that follows."""
        if not self._pinned:
            if not self._pin():
                await asyncio.Event().wait()
            self._pinned = True

    async def _begin(self, sink: AnswerSink) -> None:
        await self._ensure_pinned()
        if not self._begun:
            self._begun = True
            sink.begin(msgspec.structs.replace(self._head, version=self.versions[0]))

    def _note_versions(self, spans: Sequence[VersionSpan]) -> None:
        if spans:
            low, high = min(s.version for s in spans), max(s.version for s in spans)
            self.versions = (min(self.versions[0] or low, low), max(self.versions[1], high))


def _visible_message(reply: Reply, reader: AnswerReader) -> Message:
    """Return the message as the caller gets it: cut before the stop string, and with the text that was streamed."""
    message = dict(reply.message)
    content = message.get("content")
    if isinstance(content, str) and reader.stop is not None:
        message["content"] = content = content.partition(reader.stop)[0]
    if reader.shown and not (content or "").startswith(reader.shown):
        message["content"] = reader.shown
    return message


async def _in_thread_if_long(call: Call, plan: Callable[[], PromptPlan], plans: list[PromptPlan]) -> PromptPlan:
    """Plan a call and put the plan into `plans`; in a thread if that takes long.

    A cancellation is delivered when the thread has ended, because nobody else may use the ledger before.
    """
    # A conversation that a call continues by its id is not in the request, and may be long.
    if call.nbytes < LONG_BYTES and not call.previous:
        plans.append(plan())
        return plans[-1]
    work = asyncio.ensure_future(asyncio.to_thread(plan))
    try:
        plans.append(await asyncio.shield(work))
    except asyncio.CancelledError:
        await asyncio.wait([work])
        if not work.cancelled() and work.exception() is None:
            plans.append(work.result())
        raise
    return plans[-1]


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed."""
    return f"{prefix}{secrets.token_hex(ID_BYTES)}"
