"""Images through the gateway, by the real clients: to a vision-language model, and within bounds."""

from __future__ import annotations

import base64
import io
from typing import Any

import anthropic
import openai
import pytest
from gateway_world import TOKEN, Running, ask, client, running
from tiny_vision import PLACES, encoded_image, part

from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.data.media.image_processor import load_image_processor
from relax_rt.roles.data.media.images import MAX_IMAGES, ImageSpan
from relax_rt.roles.gateway.app import HttpLimits
from relax_rt.roles.models.tokenizer import load_tokenizer
from relax_rt.roles.rollout.router.core import GenerationRequest

pytest.importorskip("torch")
pillow = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    from tiny_vision import build_seeing_model

    folder = build_seeing_model(tmp_path_factory.mktemp("seeing"))
    return ChatTemplate(load_tokenizer(folder), image_processor=load_image_processor(folder))


def counts(prompt: str, wanted: GenerationRequest) -> str:
    """How many images it was shown."""
    return f"I see {len(wanted.media)}."


def seen(*numbers: int) -> Any:
    return [{"role": "user", "content": [{"type": "text", "text": "look"}, *(part(encoded_image(n)) for n in numbers)]}]


async def test_images_of_a_client_reach_the_engine_and_the_trainer(chat: ChatTemplate) -> None:
    async with running(counts, chat=chat) as world, client(world, world.episode()) as api:
        first = await api.chat.completions.create(model="policy", messages=seen(1, 2))
        said = first.choices[0].message
        assert said.content == "I see 2."
        messages = [*seen(1, 2), {"role": "assistant", "content": said.content}, *seen(3)]
        second = await api.chat.completions.create(model="policy", messages=messages)
        assert second.choices[0].message.content == "I see 3."
        one, other = world.engine.orders
        assert [shown.data for shown in other.media] == [encoded_image(1), encoded_image(2), encoded_image(3)]
        assert other.media[:2] == one.media and other.prompt[: len(one.prompt)] == one.prompt
        assert all(shown.end - shown.start == PLACES for shown in other.media)
        episode = world.sessions.close("episode-1").episode
        (branch,) = episode.branches
        assert branch.tokens[: len(other.prompt)] == other.prompt
        kept = [ImageSpan(one.start, one.end, episode.images[one.digest]) for one in branch.media]
        assert kept == list(other.media)


async def test_all_apis_have_the_same_images(chat: ChatTemplate) -> None:
    data = base64.b64encode(encoded_image(1)).decode()
    url = f"data:image/png;base64,{data}"
    async with running(counts, chat=chat) as world, client(world) as api:
        await api.chat.completions.create(model="policy", messages=seen(1))
        given: Any = [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "look"},
                    {"type": "input_image", "image_url": url, "detail": "auto"},
                ],
            }
        ]
        await api.responses.create(model="policy", input=given)
        blocks: Any = [
            {"type": "text", "text": "look"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
        ]
        async with anthropic.AsyncAnthropic(base_url=world.url, api_key=TOKEN, max_retries=0) as other:
            await other.messages.create(model="policy", max_tokens=20, messages=[{"role": "user", "content": blocks}])
        orders = world.engine.orders
        assert len(orders) == 3 and len({(order.prompt, order.media) for order in orders}) == 1


def bomb() -> dict[str, Any]:
    """A small file of a hundred million black pixels."""
    held = io.BytesIO()
    pillow.new("1", (10_000, 10_000)).save(held, "PNG")
    assert len(held.getvalue()) < 1 << 20
    return part(held.getvalue())


AT = r"new image 1: an image"


@pytest.mark.parametrize(
    ("content", "status", "why"),
    [
        ([bomb()], 400, AT + r".*at most \d+ are decoded"),
        ([part(b"no image")], 400, AT + r".*cannot be read"),
        ([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}], 400, r"nothing is fetched"),
        ([part(b"x" * (9 << 20))], 413, r"image data of \d+ bytes"),
        ([part(encoded_image(1))] * (MAX_IMAGES + 1), 400, rf"at most {MAX_IMAGES} are taken"),
        ([{"type": "text", "text": "<image>"}], 400, r"only an image has it"),
        ([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}], 400, r"is of type audio"),
        ([part(encoded_image(1)), {"type": "file", "file": {"file_id": "f"}}], 400, r"content\[1\] is of type file"),
    ],
    ids=["bomb", "nonsense", "url", "large", "many", "placeholder", "audio", "file"],
)
async def test_an_image_that_is_refused_leaves_the_gateway_serving(
    chat: ChatTemplate, content: Any, status: int, why: str
) -> None:
    async with running(counts, chat=chat, bounds=HttpLimits(body_bytes=32 << 20)) as world, client(world) as api:
        with pytest.raises(openai.APIStatusError, match=why) as caught:
            await api.chat.completions.create(model="policy", messages=[{"role": "user", "content": content}])
        assert caught.value.status_code == status and len(caught.value.message) < 600
        assert not world.engine.orders
        await still_serves(world, api)


async def test_images_are_accepted_in_user_messages_only(chat: ChatTemplate) -> None:
    async with running(counts, chat=chat) as world, client(world) as api:
        for role in ("system", "assistant"):
            messages: Any = [{"role": role, "content": [part(encoded_image(1))]}, *ask("look")]
            with pytest.raises(openai.BadRequestError, match="images in user messages"):
                await api.chat.completions.create(model="policy", messages=messages)
        await still_serves(world, api)


async def still_serves(world: Running, api: Any) -> None:
    answer = await api.chat.completions.create(model="policy", messages=seen(4))
    assert answer.choices[0].message.content == "I see 1."
