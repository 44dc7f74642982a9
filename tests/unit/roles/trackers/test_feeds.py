"""Sinks fed from a metrics file: real event files, resumed runs, disks that are full, packages that are gone."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relax_rt.config.loader import load_config
from relax_rt.config.problems import ConfigErrors
from relax_rt.observe.metrics import METRICS, MetricsLog
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.trackers import settings as writer_settings
from relax_rt.roles.trackers.feed import POSITION_FILE, Feed, FeedPosition, Point, TensorBoardSink, read_position
from relax_rt.roles.trackers.role import WriterRole
from relax_rt.roles.trackers.settings import WriterSettings


class Kept:
    """Keeps what it is told; fails from a certain point on."""

    name = "kept"

    def __init__(self, fail_after: int = 1 << 30) -> None:
        self.points: list[Point] = []
        self.fail_after, self.closed = fail_after, False

    def write(self, points: Any) -> None:
        self.points += points
        if len(self.points) > self.fail_after:
            raise OSError(28, "No space left on device")

    def close(self) -> None:
        self.closed = True


def told(run_dir: Path, steps: range) -> None:
    log = MetricsLog(run_dir, "trainer/0#1")
    for step in steps:
        log.write({"kind": "step", "step": step, "loss": step / 4})
    log.close()


def drain(feed: Feed) -> None:
    while feed.poll():
        pass


def feed(run_dir: Path, sink: Any) -> Feed:
    (run_dir / "kept").mkdir(exist_ok=True)
    return Feed(run_dir, run_dir / "kept", sink)


def test_a_resumed_feed_continues_where_the_last_one_was(tmp_path: Path) -> None:
    first, second = Kept(), Kept()
    one = feed(tmp_path, first)
    assert one.poll() == 0
    told(tmp_path, range(1, 4))
    with (tmp_path / METRICS).open("ab") as out:
        out.write(b'{"kind": "step", "st')
    drain(one)
    one.close()
    with (tmp_path / METRICS).open("ab") as out:
        out.write(b'ep": 4, "loss": 1.0}\n')
    told(tmp_path, range(5, 7))
    drain(feed(tmp_path, second))
    assert [p.step for p in first.points] == [1, 2, 3] and [p.step for p in second.points] == [4, 5, 6]
    assert first.closed and not any(p.redone for p in second.points)


@pytest.mark.parametrize("mark", [b"", b"{", b'{"bytes": 10000000, "step": 9}'])
def test_a_mark_that_says_nothing_begins_at_the_start(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / POSITION_FILE).write_bytes(mark)
    told(tmp_path, range(1, 4))
    kept = Kept()
    drain(feed(tmp_path, kept))
    assert [p.step for p in kept.points] == [1, 2, 3]
    assert read_position(tmp_path / "kept" / POSITION_FILE) == FeedPosition((tmp_path / METRICS).stat().st_size, 3)


# --- the role


def role(run_dir: Path, settings: WriterSettings, events: list[tuple[str, dict[str, Any]]]) -> WriterRole:
    config = RLConfig.model_validate(
        {"run": {"name": "a"}, "model": {"path": "m"}, "data": {"task": "t"}, "reward": {"function": "f:g"}}
    )

    async def ready() -> None:
        return None

    ctx = cast(
        Any,
        SimpleNamespace(
            config=config,
            settings=settings,
            run_dir=run_dir,
            run_id="abcd1234",
            stopping=asyncio.Event(),
            ready=ready,
            event=lambda kind, **fields: events.append((kind, fields)),
            log=SimpleNamespace(warning=lambda *a, **k: None),
            progress=SimpleNamespace(advance=lambda *a: None, waiting=lambda *a: None, extend=lambda *a: None),
        ),
    )
    return WriterRole(ctx)


async def test_a_sink_that_fails_ends_alone(tmp_path: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    writer = role(tmp_path, WriterSettings(), events)
    good, bad = Kept(), Kept(fail_after=2)
    writer._feeds = [feed(tmp_path, bad), Feed(tmp_path, tmp_path, good)]
    told(tmp_path, range(1, 9))
    work = asyncio.create_task(writer.run())
    while len(good.points) < 8:  # noqa: ASYNC110 it is filled from a thread
        await asyncio.sleep(0.01)
    told(tmp_path, range(9, 12))
    writer.ctx.stopping.set()
    await work
    await writer.teardown()
    # What came just before the stop is told too.
    assert [p.step for p in good.points] == list(range(1, 12)) and good.closed and bad.closed
    assert [(kind, fields["sink"]) for kind, fields in events] == [("writer_failed", "kept")]
    assert "No space left" in events[0][1]["why"]


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
async def test_a_package_that_is_gone_later_ends_the_writer_in_an_event(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_MODE"):
        monkeypatch.setenv(name, "")
    for name in ("WANDB_ERROR_REPORTING", "WANDB_SILENT"):
        monkeypatch.setenv(name, "")
    events: list[tuple[str, dict[str, Any]]] = []
    async with asyncio.timeout(120):
        await role(tmp_path, WriterSettings.model_validate({package: True}), events).run()
    assert [kind for kind, _ in events] == ["writer_failed", "writer_ended"]
    assert f"relax-rt[{package}]" in events[0][1]["why"]


# --- what a config may ask for

TOML = """
[run]
name = "r"
[model]
path = "m"
[data]
task = "chain_sum"
[reward]
function = "f:g"
[roles.writer]
"""


@pytest.mark.parametrize(
    ("table", "found", "key", "words"),
    [
        ("tensorboard = true", True, "", ""),
        ("wandb = true\ntensorboard = true", True, "", ""),
        ("", True, "roles.writer", "nothing to write"),
        ("tensorboard = true", False, "roles.writer.tensorboard", "is not installed"),
        ("wandb = true", False, "roles.writer.wandb", "is not installed"),
        ('wandb = true\npython = "' + sys.executable + '"', False, "", ""),
        ("count = 0", False, "", ""),
        ("wandb = true\ntensorbord = true", True, "roles.writer.tensorbord", "unknown"),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(
    table: str, found: bool, key: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_settings, "find_spec", lambda name: object() if found else None)
    path = tmp_path / "roles.toml"
    path.write_text(TOML + table)
    said: dict[str, str] = {}
    try:
        config = load_config(path)
        assert isinstance(config.roles["writer"], WriterSettings) and config.roles["writer"].nice == 10
    except ConfigErrors as error:
        said = {".".join(map(str, p.path)): p.message + p.hint for p in error.problems}
    assert list(said) == ([key] if key else [])
    assert not key or words in said[key]


# --- real event files


@pytest.fixture
def accumulate() -> Any:
    """Reads a folder of event files with TensorBoard's own reader."""
    pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
        found = EventAccumulator(str(folder))
        found.Reload()
        return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}

    return read


def test_tensorboard_reads_what_was_reported(tmp_path: Path, accumulate: Any) -> None:
    told(tmp_path, range(1, 5))
    folder = tmp_path / "tensorboard"
    one = Feed(tmp_path, folder, TensorBoardSink(folder))
    drain(one)
    # Readable while it is written.
    assert accumulate(folder) == {"train/loss": [(n, n / 4) for n in range(1, 5)]}
    one.close()
    with (tmp_path / METRICS).open("ab") as out:
        out.write(json.dumps({"kind": "step", "step": 3, "loss": 30.0}).encode() + b"\n")
    (folder / next(p.name for p in folder.iterdir() if "tfevents" in p.name)).rename(
        folder / "events.out.tfevents.0000000001.host.1"
    )
    again = Feed(tmp_path, folder, TensorBoardSink(folder))
    drain(again)
    again.close()
    # The trainer went back behind step 3: what was told of steps 3 and 4 is forgotten.
    assert accumulate(folder) == {"train/loss": [(1, 0.25), (2, 0.5), (3, 30.0)]}


def test_a_full_disk_is_an_error_at_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = TensorBoardSink(tmp_path / "tensorboard")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(OSError, match="File too large"):
            for step in range(1000):
                sink.write([Point(step, 1.0, {"a": 1.0})])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    sink.close()
