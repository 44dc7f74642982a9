"""The embedded engine against transformers' own forward pass, on a tiny random model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from relax_rt.roles.engines.base import Completion, GroupRequest  # noqa: E402
from relax_rt.roles.engines.embedded import EmbeddedEngine, sample  # noqa: E402
from relax_rt.transport.errors import Refused  # noqa: E402

VOCABULARY = 97
STOP = 5


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("model")
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


class Collected:
    """Completions of an engine, awaited by number."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine, self.done, self.failure = engine, [], None
        self._changed = threading.Condition()
        engine.start(self._add, self._fail)

    def _add(self, completion: Completion) -> None:
        with self._changed:
            self.done.append(completion)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = error
            self._changed.notify_all()

    def wait(self, count: int) -> dict[tuple[int, int], Completion]:
        with self._changed:
            assert self._changed.wait_for(lambda: self.failure or len(self.done) >= count, 60)
        if self.failure:
            raise self.failure
        return {(c.request, c.member): c for c in self.done}


@pytest.fixture
def engine(model_dir: Path) -> Iterator[Collected]:
    engine = EmbeddedEngine(model_dir, dtype="float32", max_sequences=12, threads=1)
    yield Collected(engine)
    engine.close(10)


def request(id: int, prompt: list[int], n: int, new: int = 12, temperature: float = 0.7) -> GroupRequest:
    return GroupRequest(
        id=id,
        prompt=tuple(prompt),
        seeds=tuple(1000 * id + i for i in range(n)),
        temperature=temperature,
        max_new_tokens=new,
        stop_ids=frozenset([STOP]),
    )


REQUESTS = [
    request(0, [7, 8, 9], 4),
    request(1, [11] * 20, 3, new=30),
    request(2, [3], 5, new=7),
    request(3, [60, 61, 62, 63], 4, temperature=1.3),
    request(4, [9, 9], 8, new=3),
]


def reference(model_dir: Path, completion: Completion, asked: GroupRequest) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    ids = torch.tensor([[*asked.prompt, *completion.tokens]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(asked.prompt) - 1 : -1] / asked.temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]


def test_logprobs_are_those_of_the_model_whatever_is_batched_together(engine: Collected, model_dir: Path) -> None:
    engine.engine.submit(REQUESTS)  # 24 members in 12 slots: rows leave and join
    done = engine.wait(24)
    assert len(done) == 24
    for asked in REQUESTS:
        for member in range(len(asked.seeds)):
            got = done[asked.id, member]
            torch.testing.assert_close(
                torch.tensor(got.logprobs), reference(model_dir, got, asked), atol=2e-5, rtol=1e-4
            )
            assert got.finish_reason == ("stop" if got.tokens[-1] == STOP else "length")
            assert len(got.tokens) <= asked.max_new_tokens
            assert STOP not in got.tokens[:-1]


def test_tokens_depend_on_the_seed_and_not_on_the_neighbours(model_dir: Path) -> None:
    runs = []
    for order in (REQUESTS, REQUESTS[::-1]):
        engine = EmbeddedEngine(model_dir, dtype="float32", max_sequences=12, threads=1)
        collected = Collected(engine)
        for asked in order:
            engine.submit([asked])
        runs.append({k: c.tokens for k, c in collected.wait(24).items()})
        engine.close(10)
    assert runs[0] == runs[1]
    assert len({tuple(runs[0][0, m]) for m in range(4)}) > 1


def test_a_swap_in_mid_sequence_keeps_the_tokens_and_marks_the_versions(engine: Collected) -> None:
    long = GroupRequest(id=9, prompt=(1, 2), seeds=(1, 2), temperature=1.0, max_new_tokens=200, stop_ids=frozenset())
    engine.engine.submit([long])
    while engine.engine.load().tokens_generated < 20:
        threading.Event().wait(0.001)
    standby = engine.engine.weights.standby()
    standby[:] = bytes(len(standby))  # all-zero weights: every token is equally likely
    swapped = threading.Event()
    engine.engine.swap(4, swapped.set)
    assert swapped.wait(30)
    done = engine.wait(2)
    for completion in done.values():
        assert len(completion.tokens) == 200
        old, new = completion.versions
        assert (old.start, old.end, old.version, old.kv_version) == (0, new.start, 0, 0)
        assert (new.end, new.version, new.kv_version) == (200, 4, 0)
        uniform = torch.full((200 - new.start,), -torch.log(torch.tensor(float(VOCABULARY))).item())
        torch.testing.assert_close(torch.tensor(completion.logprobs[new.start :]), uniform)
    assert engine.engine.load().version == 4


def test_an_aborted_request_completes_with_what_it_has(engine: Collected) -> None:
    long = GroupRequest(id=9, prompt=(1, 2), seeds=(1,), temperature=1.0, max_new_tokens=250, stop_ids=frozenset())
    engine.engine.submit([long])
    while engine.engine.load().tokens_generated < 5:
        threading.Event().wait(0.001)
    engine.engine.abort(9)
    completion = engine.wait(1)[9, 0]
    assert completion.finish_reason == "abort"
    assert 5 <= len(completion.tokens) == len(completion.logprobs) < 250


def test_an_aborted_request_that_waits_for_slots_completes_empty(engine: Collected) -> None:
    long = [
        GroupRequest(
            id=i, prompt=(1, 2), seeds=tuple(range(12)), temperature=1.0, max_new_tokens=200, stop_ids=frozenset()
        )
        for i in range(2)
    ]
    engine.engine.submit(long)  # 12 slots: the second group waits for the first
    while engine.engine.load().tokens_generated < 5:
        threading.Event().wait(0.001)
    engine.engine.abort(1)
    done = engine.wait(24)
    assert all(done[1, m].finish_reason == "abort" and done[1, m].tokens == [] for m in range(12))
    assert all(len(done[0, m].tokens) == 200 for m in range(12))


def test_greedy_is_the_most_likely_token(engine: Collected, model_dir: Path) -> None:
    asked = request(0, [7, 8, 9], 1, temperature=0)
    engine.engine.submit([asked])
    got = engine.wait(1)[0, 0]
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    ids = torch.tensor([[*asked.prompt, *got.tokens]])
    with torch.no_grad():
        assert model(ids).logits[0, 2:-1].argmax(-1).tolist() == got.tokens


def test_what_cannot_fit_is_refused_before_it_is_queued(engine: Collected) -> None:
    with pytest.raises(Refused, match="context is 256 tokens"):
        engine.engine.submit([request(0, [1] * 250, 1)])
    with pytest.raises(Refused, match="a group of 13"):
        engine.engine.submit([request(0, [1], 13)])
    assert engine.engine.load().waiting == 0


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.0, 0.7]])).expand(10_000, -1)
    uniforms = (torch.arange(10_000) + 0.5) / 10_000
    tokens, logprobs = sample(logits, torch.ones(10_000), uniforms)
    assert torch.bincount(tokens, minlength=4).tolist() == pytest.approx([1000, 2000, 0, 7000], abs=2)
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.1, 0.2, 0.0, 0.7])[tokens])
