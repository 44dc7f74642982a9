"""Routing rows of the server: how they are asked for, how they are read, and what is refused."""

from __future__ import annotations

import base64
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from relax_rt.roles.rollout.engines.base import GroupRequest, Partial
from relax_rt.roles.rollout.engines.settings import EngineSettings, RolloutSettings
from relax_rt.roles.rollout.engines.sglang import requests as asking
from relax_rt.roles.rollout.engines.sglang.client import Meta
from relax_rt.roles.rollout.engines.sglang.options import Boot, server_options
from relax_rt.roles.rollout.engines.sglang.requests import Batch, Member, RowDecoder, request_body
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import ProtocolError, Refused

MOE = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 128,
    "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "mlp_only_layers": [1],
}  # fmt: skip


def reader(folder: Path, **changes: Any) -> RowDecoder:
    (folder / "config.json").write_text(json.dumps(MOE | changes))
    return RowDecoder(folder)


def request(**rest: Any) -> GroupRequest:
    values: dict[str, Any] = {"id": 1, "prompt": (1, 2, 3), "temperature": 1.0, "stop_ids": frozenset([9])}
    return GroupRequest(**{**values, "max_new_tokens": 10, "seeds": (1, 2), "routing": True, **rest})


def test_what_the_server_tells_is_read(tmp_path: Path) -> None:
    experts = np.array([[[5, 2], [0, 0], [1, 7]], [[3, 6], [0, 0], [4, 0]]], np.int32)
    read = reader(tmp_path).read(memoryview(base64.b64encode(experts.tobytes())))
    assert read.tolist() == [[[2, 5], [-1, -1], [1, 7]], [[3, 6], [-1, -1], [0, 4]]]
    for odd in (base64.b64encode(experts.tobytes()[:-4]), b"no base64!", b"AAA="):
        with pytest.raises(ProtocolError, match="not of 3 layers and 2 experts"):
            reader(tmp_path).read(memoryview(odd))


async def test_rows_of_many_tokens_are_read_off_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows in pieces as at once; padding within them is refused, and what has none has none."""
    monkeypatch.setattr(asking, "PIECE", 8)
    experts = np.arange(60, dtype=np.int32).reshape(-1, 3, 2) % 8
    text = base64.b64encode(experts.tobytes())
    rows, threads = reader(tmp_path), []
    read = rows.read
    monkeypatch.setattr(rows, "read", lambda text: threads.append(threading.get_ident()) or read(text))
    for limit, here in ((len(text), True), (len(text) - 1, False)):
        monkeypatch.setattr(asking, "LARGE_BYTES", limit)
        told = await rows.rows_in(Meta("s", routed_experts=msgspec.Raw(b'"' + text + b'"')))
        assert told is not None and (told[:, 0] == np.sort(experts[:, 0])).all()
        assert (threads[-1] == threading.get_ident()) is here
    with pytest.raises(ProtocolError, match="padded before its end"):
        read(memoryview(b"AAAAAAA=" + text))
    for none in (b"", b"null", b'""'):
        assert await rows.rows_in(Meta("s", routed_experts=msgspec.Raw(none))) is None


def test_a_model_without_them_is_refused_before_its_server_is_started(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="it is dense"):
        reader(tmp_path, model_type="qwen3")
    with pytest.raises(Refused, match="how it routes is not known"):
        reader(tmp_path, model_type="mixtral")


def test_more_rows_than_an_answer_holds_are_refused(tmp_path: Path) -> None:
    wide = reader(tmp_path, num_hidden_layers=48, num_experts=128, num_experts_per_tok=8)
    wide.check(request(max_new_tokens=131_000))
    wide.check(request(max_new_tokens=1 << 20, routing=False))
    with pytest.raises(Refused, match="rows of 131073 tokens"):
        wide.check(request(max_new_tokens=131_070))
    wide.check(request(max_new_tokens=131_070, rows_from=2))


def test_a_call_asks_for_the_rows_that_one_of_its_members_lacks(tmp_path: Path) -> None:
    shape = reader(tmp_path).shape
    had = Partial((4, 5), (-1.0, -2.0), (VersionSpan(0, 2, 7, 7),), bytes(2 * shape.row_bytes))
    members = [Member.from_request(request(partials=(had, None), chunk_tokens=4), index, 1, shape) for index in (0, 1)]

    def asked() -> tuple[Any, ...]:
        for member in members:
            member.begin(f"s{member.index}", 7)
        body = request_body(Batch(members), seeded=False)
        lengths = [params["max_new_tokens"] for params in body["sampling_params"]]
        return body["return_routed_experts"], body["routed_experts_start_len"], lengths, body["input_ids"]

    assert asked() == (True, 0, [4, 4], [[1, 2, 3, 4, 5], [1, 2, 3]])
    for member in members:
        member.has_prompt_rows = True
    assert asked()[1] == 2, "the second has no token yet"
    plain = Member.from_request(request(routing=False), 0, 1, shape)
    plain.begin("s", 7)
    assert "return_routed_experts" not in request_body(Batch([plain]), seeded=False)


def test_the_server_is_told_to_keep_them_where_they_are_wanted() -> None:
    boot = Boot(model=Path("m"), port=1, name="n", secrets=Path("s"))

    def option(settings: EngineSettings) -> object:
        return server_options(settings, "cpu", boot, kv_tokens=9, context=9).get("enable-return-routed-experts")

    assert option(RolloutSettings(engine="sglang", routing=True)) is True
    assert option(RolloutSettings(engine="sglang")) is option(EngineSettings(engine="sglang")) is None
    with pytest.raises(Refused, match="the engine sets it itself"):
        option(RolloutSettings.model_validate({"sglang": {"arguments": {"enable_return_routed_experts": True}}}))
