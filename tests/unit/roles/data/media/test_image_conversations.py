"""Conversations with images: expanded once, by the model's own processor, and kept as they were sampled."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vision import PLACES, encoded_image, part

pytest.importorskip("torch")
pytest.importorskip("PIL")

from relax_rt.roles.agentic.tokens.images import ingest_images
from relax_rt.roles.agentic.tokens.ledger import TokenLedger
from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.agentic.tokens.types import Message, PromptPlan, Sampled
from relax_rt.roles.data.media.image_processor import ImageProcessor, load_image_processor
from relax_rt.roles.data.media.images import MAX_IMAGES, ImageSpan, decode_image
from relax_rt.roles.models.tokenizer import load_tokenizer
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Refused


@pytest.fixture(scope="module")
def chat(seeing: Path) -> ChatTemplate:
    return ChatTemplate(load_tokenizer(seeing), image_processor=load_image_processor(seeing))


def ledger(chat: ChatTemplate, **bounds: int) -> TokenLedger:
    return TokenLedger(chat, **{"max_tokens": 1 << 20, "session": "s", **bounds})  # type: ignore[arg-type]


def said(chat: ChatTemplate, draw: random.Random) -> Sampled:
    """What a model without sense says: any tokens, placeholders of images among them."""
    assert chat.image_processor is not None
    tokens = [draw.choice([20, 30, 40, 50, chat.image_processor.placeholder]) for _ in range(draw.randrange(6))]
    stop = draw.random() < 0.7
    tokens += [chat.tokenizer.end_id] if stop or not tokens else []
    count = len(tokens)
    ended = "stop" if tokens[-1] == chat.tokenizer.end_id else "length"
    return Sampled(tuple(tokens), (-0.5,) * count, (VersionSpan(0, count, 1, 1),), ended)


def by_processor(chat: ChatTemplate, messages: list[Message]) -> list[int]:
    """The whole conversation as the model's own processor makes tokens of it."""
    assert chat.image_processor is not None
    images = [
        decode_image(encoded_image(one["number"]))
        for m in messages
        if isinstance(m["content"], list)
        for one in m["content"]
        if one["type"] == "image"
    ]
    text = chat.tokenizer.text(messages)
    made = chat.image_processor._processor(text=[text], images=images or None, add_special_tokens=False)
    return list(made["input_ids"][0])


def whole(plan: PromptPlan, image_processor: ImageProcessor) -> None:
    """Images stand in the prompt where it says, in order."""
    image_processor.check(plan.tokens, plan.media)


Turn = st.lists(st.sampled_from(["hello", "", "12 + 30 =", 1, 2, 3]), min_size=1, max_size=4)


@settings(max_examples=60)
@given(turns=st.lists(Turn, min_size=1, max_size=5), seed=st.integers(0, 999), named=st.booleans())
async def test_tokens_are_those_of_the_processor_and_later_turns_extend_them(
    chat: ChatTemplate, turns: list[list[Any]], seed: int, named: bool
) -> None:
    assert chat.image_processor is not None
    book, draw = ledger(chat), random.Random(seed)
    messages: list[Message] = []
    tokens: tuple[int, ...] = ()
    shown: list[bytes] = []
    previous: str | None = None
    for turn in turns:
        content = [part(encoded_image(one)) if isinstance(one, int) else {"type": "text", "text": one} for one in turn]
        shown += [encoded_image(one) for one in turn if isinstance(one, int)]
        messages = await ingest_images(
            [*messages, {"role": "user", "content": content}], book.image_processor, book.add_image
        )
        plan = book.prompt(messages, previous=previous if named else None)
        whole(plan, chat.image_processor)
        assert [one.data for one in plan.media] == shown
        assert plan.tokens[: len(tokens)] == tokens, "what was there was made anew"
        if not tokens:
            plainly = [
                {"type": "image", "number": one} if isinstance(one, int) else {"type": "text", "text": one}
                for one in turn
            ]
            assert list(plan.tokens) == by_processor(chat, [{"role": "user", "content": plainly}])
        what = said(chat, draw)
        reply = book.sampled(plan, what)
        tokens, previous = (*plan.tokens, *what.tokens), reply.id
        messages = [*messages, reply.message]
    episode = book.episode()
    (branch,) = episode.branches
    assert branch.tokens == tokens
    assert [ImageSpan(one.start, one.end, episode.images[one.digest]) for one in branch.media] == list(plan.media)
    assert sorted(episode.images.values()) == sorted(set(shown))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(episode), type=type(episode)) == episode


async def test_another_image_is_another_conversation(chat: ChatTemplate) -> None:
    book, draw = ledger(chat), random.Random(1)

    async def asked(number: int, *more: Message) -> PromptPlan:
        first = {"role": "user", "content": [{"type": "text", "text": "what?"}, part(encoded_image(number))]}
        return book.prompt(await ingest_images([first, *more], book.image_processor, book.add_image))

    plan = await asked(1)
    reply = book.sampled(plan, said(chat, draw))
    following = (reply.message, {"role": "user", "content": "and now?"})
    assert (await asked(1, *following)).kind == "continuation"
    changed = await asked(2, *following)
    assert changed.kind == "drift" and [one.data for one in changed.media] == [encoded_image(2)]
    again = await asked(1)
    assert again.kind == "fork" and again.tokens == plan.tokens and again.media == plan.media


async def test_a_text_cannot_take_a_images_place(chat: ChatTemplate) -> None:
    book = ledger(chat)
    for content in ("look: <image>", [{"type": "text", "text": "<image>"}, part(encoded_image(1))]):
        messages = await ingest_images([{"role": "user", "content": content}], book.image_processor, book.add_image)
        with pytest.raises(Refused, match="'<image>' stands there"):
            book.prompt(messages)
    assert book.episode().counts.first == 0
    messages = await ingest_images(
        [{"role": "user", "content": [part(encoded_image(1))]}], book.image_processor, book.add_image
    )
    assert len(book.prompt(messages).media) == 1


async def test_images_of_an_episode_are_bounded(chat: ChatTemplate) -> None:
    size = len(encoded_image(0))
    book = ledger(chat, max_media_bytes=2 * size + 100)
    one, two, three = ([{"role": "user", "content": [part(encoded_image(n))]}] for n in range(3))
    await ingest_images(one, book.image_processor, book.add_image)
    await ingest_images(two, book.image_processor, book.add_image)
    await ingest_images(one, book.image_processor, book.add_image)
    with pytest.raises(Refused, match=r"raise roles\.env\.media_kib"):
        await ingest_images(three, book.image_processor, book.add_image)
    many = [{"role": "user", "content": [part(encoded_image(0))] * (MAX_IMAGES + 1)}]
    with pytest.raises(Refused, match=f"at most {MAX_IMAGES} are taken"):
        await ingest_images(many, ledger(chat).image_processor, ledger(chat).add_image)


async def test_a_budget_counts_the_tokens_of_images(chat: ChatTemplate) -> None:
    book = ledger(chat, max_tokens=PLACES)
    messages = await ingest_images(
        [{"role": "user", "content": [part(encoded_image(1))]}], book.image_processor, book.add_image
    )
    with pytest.raises(Refused, match="max_tokens"):
        book.prompt(messages)


async def test_a_model_of_texts_takes_none(seeing: Path) -> None:
    book = ledger(ChatTemplate(load_tokenizer(seeing)))
    messages = [{"role": "user", "content": [part(encoded_image(1))]}]
    assert await ingest_images(messages, book.image_processor, book.add_image) is messages


def test_a_template_without_places_is_refused(seeing: Path) -> None:
    tokenizer, image_processor = load_tokenizer(seeing), load_image_processor(seeing)
    places = "{% for m in messages %}{% for part in m.content if part is mapping %}{{ part.text or '<image>' }}"
    with pytest.raises(Refused, match="it must write '<image>' once"):
        ChatTemplate(
            tokenizer,
            template="{% for m in messages %}{{ m.content }}<|end|>{% endfor %}",
            image_processor=image_processor,
        )
    taken = ChatTemplate(tokenizer, template=places + "{% endfor %}{% endfor %}", image_processor=image_processor)
    assert taken.text([{"role": "user", "content": "a"}]) == "a", "a text is a list of one part for such a template"
