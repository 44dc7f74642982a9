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
from relax_rt.roles.agentic.tokens.types import LedgerReply, PromptPlan, SampledCompletion
from relax_rt.roles.data.media.image_processor import ImageProcessor, ProcessedImage
from relax_rt.roles.gateway.calls import Answer, AnswerSink, Call, CallError, Choice, Head, Message, bad
from relax_rt.roles.gateway.reading import AnswerReader, SampledTokens, tokens_before
from relax_rt.roles.gateway.request_body import CHARACTERS_A_TOKEN, LONG_BYTES, characters
from relax_rt.roles.gateway.request_parts import image_refused
from relax_rt.roles.gateway.sessions import Session, StreamedAnswer, adopt_partial_answer
from relax_rt.roles.rollout.engines.routing import PART_TOKENS
from relax_rt.roles.rollout.router.admission import AdmissionQueue, AdmissionRejected
from relax_rt.roles.rollout.router.core import Deliver, GenerationRequest, Outcome
from relax_rt.roles.rollout.router.router import NotGenerated
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Refused, RelaxError

ID_BYTES = 12
CHUNK_TOKENS, LARGE_CHUNK_TOKENS = 8, 32
"""Tokens that an engine makes between two pieces: for a caller who looks at them, and for one who waits for the end."""
MAY_OPEN_A_THOUGHT = 64
"""Characters at a prompt's end in which the template may have opened the model's thoughts."""


class Tokens(Protocol):
    """What makes tokens: a Router."""

    async def generate(self, wanted: GenerationRequest) -> Outcome:
        """A sequence. Raises NotGenerated."""

    def stream(self, wanted: GenerationRequest) -> AsyncIterator[Deliver]:
        """The same in parts."""


class Tokenizer(Protocol):
    """What of a ChatTokenizer is used."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def spell(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special ones written out."""


class AnswerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How calls are answered.

    Attributes:
        models: names that the model is called by; with "*" any name will do.
        temperature: the run's.
        other_temperature: a trained session that asks for another is refused, or has the run's.
        unsupported: what cannot be done is refused, or left out and named in the answer's head.
        new_tokens: of an answer at most. context: tokens of prompt and answer together.
        timeout_s: from a call's turn to its end.
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
    """An answer and what is told beside it.

    Attributes:
        versions: lowest and highest policy version of its tokens.
        plans: of the ledger, for an answer that does not arrive. streamed: one that its caller saw being made.
    """

    answer: Answer
    versions: tuple[int, int]
    plans: tuple[PromptPlan, ...] = ()
    streamed: StreamedAnswer | None = None


class _Sequence(msgspec.Struct, kw_only=True):
    """One sequence that is to be made."""

    index: int
    prompt: tuple[int, ...]
    plan: PromptPlan | None
    seed: int
    echo: str = ""


class Service:
    """Answers calls.

    Args:
        tokens: makes them. tokenizer: the model's. admission: has calls wait for their turn.
        now: seconds since 1970.
        behind: publications from a version to the newest.
        image_processor: of a model that takes images.
    """

    def __init__(
        self,
        tokens: Tokens,
        tokenizer: Tokenizer,
        admission: AdmissionQueue,
        terms: AnswerPolicy,
        now: Callable[[], float] = time.time,
        behind: Callable[[int], float] = lambda version: 0,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self.terms, self.admission, self._image_processor = terms, admission, image_processor
        self._tokens, self._tokenizer, self._now, self._behind = tokens, tokenizer, now, behind
        self.answered = self.failed = self.sampled = self.left = 0

    def check(self, call: Call, session: Session) -> tuple[float, tuple[str, ...]]:
        """The temperature that a call is sampled with, and what of it is left out.

        Raises:
            CallError: unknown model, an image for one that does not see, or something else that is refused here.
        """
        terms = self.terms
        if "*" not in terms.models and call.model not in terms.models:
            known = ", ".join(repr(name) for name in terms.models)
            raise CallError(
                404, f"there is no model {call.model!r} here, only {known}", param="model", code="model_not_found"
            )
        if self._image_processor is None and (parts := new_images(call.messages)):
            raise image_refused(parts[0])
        ignored = [one.name for one in call.unsupported]
        if ignored and terms.unsupported == "refuse":
            first = call.unsupported[0]
            hint = f'leave out {", ".join(ignored)}, or set roles.gateway.unsupported = "ignore"'
            raise bad(f"{first.name}: {first.why} ({hint})", first.name, "unsupported_parameter")
        if call.prompts and session.trained:
            message = "a text prompt has no place in an episode's conversation: use chat completions"
            raise bad(message, "prompt", "unsupported_in_session")
        own = terms.temperature if session.limits.temperature is None else session.limits.temperature
        temperature = own if call.temperature is None else call.temperature
        if session.trained and temperature != own:
            if terms.other_temperature == "refuse":
                why = f"temperature = {temperature:g}: the run samples and trains at {own:g}"
                hint = 'leave it out, or set roles.gateway.temperature = "override"'
                raise bad(f"{why} ({hint})", "temperature", "unsupported_value")
            temperature = own
            ignored.append("temperature")
        return temperature, tuple(ignored)

    async def answer(self, call: Call, session: Session, request: str, sink: AnswerSink | None = None) -> ServedAnswer:
        """Answer a call. Cancelling it ends its sequences, and nothing of it is trained on, unless a later call of the
        session goes on with what was seen of it.

        Args:
            request: id of the answer.

        Raises:
            CallError: it cannot be answered.
        """
        temperature, ignored = self.check(call, session)
        number = session.begin_call()
        task = asyncio.current_task()
        assert task is not None
        session.at_work.add(task)
        plans: list[PromptPlan] = []
        streamed: StreamedAnswer | None = None
        try:
            wanted, messages = await self._prepare(call, session, number, plans)
            if sink is not None and session.trained and call.n == 1:
                streamed = StreamedAnswer(request, messages, call.tools, plans[0], sink.gone, may_call=call.may_call)
                session.streams.append(streamed)
            head = Head(
                id=request,
                created=int(self._now()),
                model=call.model,
                prompt_tokens=sum(len(one.prompt) for one in wanted[:: call.n]),
                reused_tokens=sum(plan.reused for plan in plans),
                ignored=(*ignored, *(["tools"] if any(plan.unseen for plan in plans) else [])),
            )
            job = _RunningCall(self, call, session, head, temperature, sink, streamed)
            choices = await self.admission.run(session.group, lambda pin: job.run(wanted, pin), sequences=len(wanted))
            self.answered += 1
            session.answered += 1
            session.trouble, session.never = "", False
            if streamed is not None:
                streamed.counted, streamed.text = True, str(choices[0].message.get("content") or "")
            self.sampled += sum(choice.tokens for choice in choices)
            answer = Answer(head=head, choices=tuple(choices))
            return ServedAnswer(answer=answer, versions=job.versions, plans=tuple(plans), streamed=streamed)
        except BaseException as error:
            self.failed += 1
            for plan in plans:
                session.abandon(plan)
            told = self._told(error, session, streamed)
            if told is error:
                raise
            raise told from error
        finally:
            session.at_work.discard(task)

    def _told(self, error: BaseException, session: Session, streamed: StreamedAnswer | None) -> BaseException:
        """What becomes of an error that has ended a call."""
        settled = streamed is not None and streamed.settled
        if isinstance(error, asyncio.CancelledError):
            if session.ended:
                # By the session's end, not by the caller: he is told.
                return CallError(409, f"session {session.name!r} {session.ended}", code="session_ended")
            if not settled:
                self._left(session, streamed)
        elif streamed is not None and streamed in session.streams:
            session.streams.remove(streamed)
        told = _as_call_error(error)
        if isinstance(told, CallError) and (told.status == 429 or told.status >= 500) and not settled:
            session.trouble, session.never = told.message, _never(error)
        return told

    async def count(self, call: Call, session: Session) -> int:
        """Tokens of the prompt that a call would have, which is not answered.

        Raises:
            CallError: it could not be.
        """
        self.check(call, session)
        plans: list[PromptPlan] = []
        await self._prepare(call, session, 0, plans)
        return len(plans[0].tokens)

    def undelivered(self, made: ServedAnswer, session: Session) -> None:
        """The caller was gone before he had it: nothing of it is trained on, unless the session goes on with what he
        had of it."""
        if made.streamed is not None and made.streamed.settled:
            return
        session.answered -= 1
        for plan in made.plans:
            session.abandon(plan)
        self._left(session, made.streamed)

    # --- inside

    def _left(self, session: Session, streamed: StreamedAnswer | None) -> None:
        if not session.trained:
            return
        self.left += 1
        session.left += 1
        if streamed is not None:
            streamed.left, streamed.counted = True, False

    async def _prepare(
        self, call: Call, session: Session, number: int, plans: list[PromptPlan]
    ) -> tuple[list[_Sequence], list[Message]]:
        """The sequences of a call, each with its prompt and seed, and the conversation that they answer; puts the
        ledger's plan into `plans`."""
        messages: list[Message] = []
        limit = min(call.max_tokens or self.terms.new_tokens, session.limits.new_tokens or self.terms.new_tokens)
        if not call.prompts:
            processed = await self._process_images(call)
            async with session.ledger() as ledger:
                session.check_open()
                call = _by_digest(call, processed, ledger)
                plan = await _rendered(call, lambda: self._plan(call, session, ledger, limit, messages), plans)
            self._check_room(plan.tokens, session)
            return [
                _Sequence(index=k, prompt=plan.tokens, plan=plan, seed=self._seed(call, session, number, k))
                for k in range(call.n)
            ], messages
        found: list[_Sequence] = []
        self._check_text(call, session, self.terms.context)
        for prompt in call.prompts:
            ids = await self._encoded(prompt, call.nbytes) if isinstance(prompt, str) else prompt
            self._check_room(ids, session)
            echo = (prompt if isinstance(prompt, str) else self._tokenizer.spell(ids)) if call.echo else ""
            for _ in range(call.n):
                k = len(found)
                seed = self._seed(call, session, number, k)
                found.append(_Sequence(index=k, prompt=ids, plan=None, seed=seed, echo=echo))
        return found, messages

    async def _process_images(self, call: Call) -> list[ProcessedImage]:
        """The images of a call. Raises: CallError, if one cannot be taken."""
        if self._image_processor is None or not (parts := new_images(call.messages)):
            return []
        try:
            return await process_images(parts, self._image_processor)
        except Refused as error:
            raise bad(str(error), "messages", "picture_refused") from error

    async def _encoded(self, text: str, nbytes: int) -> tuple[int, ...]:
        encode = self._tokenizer.encode
        return tuple(encode(text) if nbytes < LONG_BYTES else await asyncio.to_thread(encode, text))

    def _plan(
        self, call: Call, session: Session, ledger: TokenLedger, limit: int, messages: list[Message]
    ) -> PromptPlan:
        """Plan the prompt with the ledger; puts the conversation into `messages`."""
        self._check_text(call, session, min(ledger.max_tokens, self.terms.context))
        previous = session.reply(call.previous) if call.previous else None
        try:
            before = session.before(ledger, previous) if previous else []
            system: list[Message] = [{"role": "system", "content": call.instructions}] if call.instructions else []
            messages += [*system, *before, *call.messages]
            adopt_partial_answer(session, ledger, messages, self._tokenizer.spell)
            # With other instructions it is another conversation, however it goes on.
            named = None if system or session.instructed(previous) else previous
            return ledger.prompt(
                messages, call.tools, may_call=call.may_call, previous=named, n=call.n, max_new_tokens=limit
            )
        except Refused as error:
            if budget_exhausted(error):
                raise session.no_tokens(str(error)) from error
            raise bad(str(error), "messages", "conversation_refused") from error

    def _check_text(self, call: Call, session: Session, room: int) -> None:
        """Raises: CallError: its texts are far more than the room, in tokens, so that they are not even rendered."""
        if (count := characters(call)) > room * CHARACTERS_A_TOKEN:
            message = f"the call has {count} characters, and there is room for {room} tokens"
            raise session.no_tokens(message, 400, "context_length_exceeded")

    def _check_room(self, prompt: Collection[int], session: Session) -> None:
        if len(prompt) >= self.terms.context:
            message = f"the prompt has {len(prompt)} tokens, the model takes {self.terms.context} with the answer"
            raise session.no_tokens(message, 400, "context_length_exceeded")

    def _seed(self, call: Call, session: Session, number: int, k: int) -> int:
        """Derive a sequence's seed from the caller's.

        In an episode also from the call's position, which a replay repeats: a program that always asks with one seed
        would otherwise get the same answers in all members of a group.
        """
        if session.trained:
            of = session.limits.seed or session.name
            what = f"{self.terms.seed if call.seed is None else call.seed}/{of}/{number}/{k}"
        elif call.seed is not None:
            what = f"asked {call.seed}/{k}"
        else:
            return secrets.randbits(63)
        return int.from_bytes(blake2b(what.encode(), digest_size=8).digest(), "big") >> 1

    def thought(self, reply: LedgerReply, tokens: Sequence[int]) -> int:
        """How many of an answer's tokens are thoughts, the marks before them included."""
        thoughts = str(reply.message.get("reasoning_content") or "")
        begin = reply.text.find(thoughts) if thoughts else -1
        return tokens_before(tokens, begin + len(thoughts), self._tokenizer.spell) if begin >= 0 else 0

    def read(self, call: Call, prompt: Sequence[int]) -> AnswerReader:
        """A reader for an answer to this prompt."""
        end = self._tokenizer.spell(prompt[-16:])[-MAY_OPEN_A_THOUGHT:] if call.stream else ""
        return AnswerReader(
            self._tokenizer.spell,
            call.stop,
            self._tokenizer.stop_ids,
            held=end.rfind("<think>") > end.rfind("</think>"),
            calls=bool(call.tools) and call.may_call,
            logprobs=call.logprobs,
        )

    def wanted(
        self, call: Call, session: Session, one: _Sequence, temperature: float, *, pieces: bool
    ) -> GenerationRequest:
        """The request to the router for one sequence."""
        terms = self.terms
        room = terms.context - len(one.prompt)
        room = room if one.plan is None else min(room, one.plan.room)
        limit = min(call.max_tokens or terms.new_tokens, session.limits.new_tokens or terms.new_tokens, room)
        if limit < 1:
            raise session.no_tokens(f"session {session.name!r} has no tokens left for an answer")
        return GenerationRequest(
            prompt=one.prompt,
            seed=one.seed,
            temperature=temperature,
            max_new_tokens=limit,
            stop_ids=self._tokenizer.stop_ids,
            timeout_s=terms.timeout_s,
            lag=self._lag(session),
            session=session.name if session.kept else "",
            prefix=not session.kept,
            chunk_tokens=_chunk_tokens(pieces=pieces, routing=session.limits.routing),
            routing=session.limits.routing,
            rows_from=0 if one.plan is None else one.plan.rows,
            media=() if one.plan is None else one.plan.media,
        )

    def _lag(self, session: Session) -> int:
        """Publications that an engine may be behind: an answer as old as the episode's oldest token makes it no
        staler."""
        weights = session.limits.weights
        if weights == "lag":
            return self.terms.lag
        behind = self._behind(session.oldest) if session.oldest and weights == "episode" else 0
        return int(behind) if behind < float("inf") else 0

    async def pieces(self, wanted: GenerationRequest, *, whole: bool) -> AsyncIterator[Deliver]:
        """Tokens as they come, or all at the end."""
        if not whole:
            async with aclosing(self._tokens.stream(wanted)) as stream:  # type: ignore[type-var]
                async for piece in stream:
                    yield piece
            return
        done = await self._tokens.generate(wanted)
        yield Deliver(0, 0, done.tokens, done.logprobs, done.versions, done.routing, done.prompt_routing)


class _RunningCall:
    """One call at work; begun anew as a whole when it is shed."""

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
        self._begun = self._claimed = False
        self.versions = (0, 0)

    async def run(self, wanted: Sequence[_Sequence], pin: Callable[[], bool]) -> list[Choice]:
        """All sequences at once."""
        self._pin, self.versions = pin, (0, 0)
        if len(wanted) == 1:
            return [await self._one(wanted[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(one, beside=True)) for one in wanted]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return [task.result() for task in tasks]

    async def _one(self, one: _Sequence, *, beside: bool = False) -> Choice:
        """One sequence; `beside` others, so that it cannot be begun anew once it is recorded."""
        service, call, sink = self._service, self._call, self._sink
        pieces = sink is not None or bool(call.stop)
        wanted = service.wanted(call, self._session, one, self._temperature, pieces=pieces)
        reader = service.read(call, one.prompt)
        seen = self._streamed
        taken = seen.begin() if seen is not None else SampledTokens()
        looks = pieces or call.logprobs or one.plan is None
        async with aclosing(service.pieces(wanted, whole=not pieces)) as stream:  # type: ignore[type-var]
            async for piece in stream:
                count = reader.take(piece.tokens, piece.logprobs) if looks else len(piece.tokens)
                taken.add(piece, count)
                self._note(piece.versions)
                if sink is not None and (text := reader.show()):
                    await self._begin(sink)
                    sink.text(one.index, (one.echo if reader.shown == text else "") + text)
                    if seen is not None:
                        seen.text = reader.shown
                if reader.stop is not None:
                    break
        reader.finish()
        stopped = reader.stop is not None or taken.tokens[-1] in wanted.stop_ids
        what = taken.until(len(taken.tokens), "stop" if stopped else "length")
        if beside or sink is not None:
            await self._claim()
        choice = await self._ended(one, what, reader)
        if sink is not None:
            await self._begin(sink)
            sink.choice(choice)
        return choice

    async def _ended(self, one: _Sequence, what: SampledCompletion, reader: AnswerReader) -> Choice:
        session, finish = self._session, what.finish_reason
        if one.plan is None:
            reply = LedgerReply(
                f"{self._head.id}-{one.index}", {"role": "assistant", "content": reader.visible}, finish, ""
            )
            message = _told(reply, reader)
        else:
            instructed = bool(self._call.instructions)
            async with session.ledger() as ledger:
                reply = session.sampled(ledger, one.plan, what, one.index)
                message = _told(reply, reader)
                session.remember(ledger, self._head.id, reply, message, choice=one.index, instructed=instructed)
        calls = reply.finish_reason == "tool_calls"
        return Choice(
            index=one.index,
            reply=reply.id,
            message=message,
            text=one.echo + reader.visible,
            finish_reason="tool_calls" if calls else "stop" if finish == "stop" else "length",
            stop=reader.stop,
            tokens=len(what.tokens),
            thought=self._service.thought(reply, what.tokens),
            logprobs=tuple(reader.tokens),
        )

    async def _claim(self) -> None:
        """From here on it is not begun anew; if it is to be, that has been decided, and nothing more is done here."""
        if not self._claimed:
            if not self._pin():
                await asyncio.Event().wait()
            self._claimed = True

    async def _begin(self, sink: AnswerSink) -> None:
        await self._claim()
        if not self._begun:
            self._begun = True
            sink.begin(msgspec.structs.replace(self._head, version=self.versions[0]))

    def _note(self, spans: Sequence[VersionSpan]) -> None:
        if spans:
            low, high = min(s.version for s in spans), max(s.version for s in spans)
            self.versions = (min(self.versions[0] or low, low), max(self.versions[1], high))


def _told(reply: LedgerReply, reader: AnswerReader) -> Message:
    """What the caller is told of a reply: nothing behind a stop string, and no other words than he has seen."""
    message = dict(reply.message)
    content = message.get("content")
    if isinstance(content, str) and reader.stop is not None:
        message["content"] = content = content.partition(reader.stop)[0]
    if reader.shown and not (content or "").startswith(reader.shown):
        message["content"] = reader.shown
    return message


def _chunk_tokens(*, pieces: bool, routing: bool) -> int:
    """Tokens between two pieces of a sequence."""
    if routing:
        return LARGE_CHUNK_TOKENS if pieces else PART_TOKENS
    return CHUNK_TOKENS if pieces else LARGE_CHUNK_TOKENS


def _by_digest(call: Call, processed: Sequence[ProcessedImage], ledger: TokenLedger) -> Call:
    """Return a call whose images were added to the ledger. Raises: CallError, if it takes no more."""
    if not processed:
        return call
    try:
        return msgspec.structs.replace(call, messages=tuple(replace_images(call.messages, processed, ledger.add_image)))
    except Refused as error:
        raise bad(str(error), "messages", "picture_refused") from error


async def _rendered(call: Call, plan: Callable[[], PromptPlan], plans: list[PromptPlan]) -> PromptPlan:
    """Plan a call and put the plan into `plans`; in a thread where that takes long. Who is cancelled meanwhile hears of
    it when the thread has ended, since nobody else may use the ledger before."""
    # What a call goes on from by its id is not in the request, and may be long.
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


def _never(error: BaseException) -> bool:
    """Whether the engines would not answer if they were asked again."""
    return isinstance(error, NotGenerated) and (error.outcome.kind in ("refused", "failed") or error.outcome.slow)


def _as_call_error(error: BaseException) -> BaseException:
    """What a caller is told of an error."""
    if isinstance(error, NotGenerated):
        late = error.outcome.kind == "late"
        return CallError(504 if late else 503, str(error), code="late" if late else "not_generated", retry_after_s=1.0)
    if isinstance(error, AdmissionRejected):
        return CallError(429, str(error), code="busy", retry_after_s=error.retry_after_s)
    if isinstance(error, RelaxError):
        return CallError(503, str(error), code="not_generated", retry_after_s=1.0)
    return error


def new_id(prefix: str) -> str:
    """An id that cannot be guessed."""
    return f"{prefix}{secrets.token_hex(ID_BYTES)}"
