"""Loading versions into a fake server: by handles, and by the file where they fail."""

from __future__ import annotations

import base64
import io
import os
import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

torch = pytest.importorskip("torch")

from relax_rt.roles.rollout.engines.settings import SglangTable  # noqa: E402
from relax_rt.roles.rollout.engines.sglang import weight_loading as loading  # noqa: E402
from relax_rt.roles.rollout.engines.sglang.client import ServerRefused, SglangClient  # noqa: E402
from relax_rt.roles.rollout.engines.sglang.weight_loading import WeightLoader  # noqa: E402
from relax_rt.roles.rollout.engines.sglang.weights import (  # noqa: E402
    by_expert,
    content_hash,
    recipes,
)
from relax_rt.transport.base.versions import VersionRecord  # noqa: E402
from relax_rt.transport.rpc.errors import Corrupt, Refused, Unreachable  # noqa: E402
from relax_rt.transport.weights.manifest import Manifest, layout_of  # noqa: E402

SHAPES = {"a.weight": (3, 4), "norm": (5,), "l.experts.gate_up_proj": (2, 6, 4), "l.experts.down_proj": (2, 4, 3)}
LAYOUT = layout_of((name, "float32", shape, 4 * int(np.prod(shape))) for name, shape in SHAPES.items())
NAMES = [entry.name for entry in by_expert(LAYOUT).entries]


class Source:
    """A version whose every number is told by its place and its version."""

    def __init__(self, version: int) -> None:
        self.manifest, self.record = Manifest(version, 1, "", LAYOUT, (), ""), VersionRecord(version, 0, 0)

    def copy_into(self, into: memoryview) -> None:
        into[:] = (np.arange(LAYOUT.nbytes // 4, dtype=np.float32) + 1000 * self.record.version).tobytes()

    def mapped(self) -> Any:
        raise NotImplementedError


class ByName:
    """What fetches a descriptor, as the server's stand-in has it."""

    _id: str

    def detach(self) -> int:
        return os.open(self._id, os.O_RDWR)


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return ByName if name == "DupFd" else super().find_class(module, name)


class Server(SglangClient):
    """Holds copies of what it is given.

    Attributes:
        refuses: endpoints that answer with another status than 200.
        skips: names that it does not know, and passes over with a 200.
        dies: of handles.
    """

    def __init__(self) -> None:
        self.holds: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.refuses: set[str] = set()
        self.skips: set[str] = set()
        self.session = self.dies = False

    async def call(self, path: str, body: Any = None, *, timeout_s: float) -> dict[str, Any]:
        self.calls.append(path)
        body = msgspec.json.decode(body) if isinstance(body, bytes) else body
        if path in self.refuses:
            raise ServerRefused(path, why="400: not today")
        match path:
            case "/begin_weight_update" | "/end_weight_update":
                assert self.session is (path == "/end_weight_update")
                self.session = not self.session
            case "/update_weights_from_tensor":
                assert self.session
                if self.dies:
                    raise Unreachable(path, why="it died")
                (message,) = body["serialized_named_tensors"]
                self.take({n: t.numpy().tobytes() for n, t in Unpickler(io.BytesIO(base64.b64decode(message))).load()})
            case "/update_weights_from_disk":
                found = load_file(Path(body["model_path"]) / "model.safetensors")
                self.take({name: array.tobytes() for name, array in found.items()})
            case "/weights_checker":
                sums = {name: content_hash([memoryview(data)], 0, "cpu") for name, data in self.holds.items()}
                return {"ranks": [{"checksums": sums}]}
        return {}

    def take(self, tensors: dict[str, bytes]) -> None:
        self.holds |= {name: data for name, data in tensors.items() if name in NAMES and name not in self.skips}


class Rig:
    """A loader, its server, and what it told."""

    def __init__(self, folder: Path, weights: str = "handles") -> None:
        self.server, self.told, self.attempt = Server(), [], folder / "attempt"  # type: ignore[var-annotated]
        table = SglangTable.model_validate({"weights": weights})
        tell = lambda version, why: self.told.append((version, why))  # noqa: E731
        self.loader = WeightLoader(table, folder / "weights", "cpu", self.attempt, tell)
        self.loader.recipes = recipes(NAMES, by_expert(LAYOUT))

    async def publish(self, version: int) -> str:
        """The endpoint by which the server took it."""
        held = self.loader.fetch(Source(version))
        before = len(self.server.calls)
        await self.loader.load(self.server, held, flush=True)
        assert np.frombuffer(self.server.holds["a.weight"], np.float32)[0] == 1000 * version
        assert self.server.calls[-1] == "/weights_checker" and not self.server.session
        return next(path for path in self.server.calls[before:][::-1] if path.startswith("/update_weights_from_"))


@pytest.fixture
def rig(tmp_path: Path) -> Any:
    one = Rig(tmp_path)
    yield one
    one.loader.close()


DISK, TENSOR = "/update_weights_from_disk", "/update_weights_from_tensor"


async def test_a_server_opens_shared_tensors_and_copies_them(rig: Rig) -> None:
    for version in (1, 2):
        assert await rig.publish(version) == TENSOR
        assert set(rig.server.holds) == set(NAMES), "experts have names of their own"
    assert DISK not in rig.server.calls and not rig.told and not rig.attempt.exists()


@pytest.mark.parametrize("refused", ["/begin_weight_update", TENSOR])
async def test_a_server_that_refuses_handles_loads_the_file_from_then_on(rig: Rig, refused: str) -> None:
    rig.server.refuses = {refused}
    assert await rig.publish(1) == DISK
    ((version, why),) = rig.told
    assert version == 1 and "not today" in why and "tried no more" in why
    rig.server.refuses = set()
    assert await rig.publish(2) == DISK
    assert len(rig.told) == 1 and not rig.attempt.exists()


async def test_a_server_that_opens_nothing_loads_the_file(rig: Rig) -> None:
    rig.server.skips = {"norm"}
    calls, call = rig.server.calls, rig.server.call

    async def knows_it_again(path: str, body: Any = None, *, timeout_s: float) -> dict[str, Any]:
        rig.server.skips -= {"norm"} if path == DISK else set()
        return await call(path, body, timeout_s=timeout_s)

    rig.server.call = knows_it_again  # type: ignore[method-assign]
    assert await rig.publish(1) == DISK
    assert calls.count("/weights_checker") == 2 and "not what was published" in rig.told[0][1]
    rig.server.call, rig.server.skips = call, {"a.weight"}  # type: ignore[method-assign]
    with pytest.raises(Corrupt):
        await rig.publish(2)


async def test_handles_are_not_retried_after_they_ended_a_server(rig: Rig, tmp_path: Path) -> None:
    rig.server.dies = True
    with pytest.raises(Unreachable):
        await rig.publish(1)
    assert not rig.told and rig.attempt.exists()
    successor = Rig(tmp_path)
    assert successor.told[0][0] == 0 and "ended while the server opened handles" in successor.told[0][1]
    assert await successor.publish(1) == DISK
    successor.loader.close()


async def test_a_device_without_room_falls_back_for_one_version(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise Refused("weights on the device", why="out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(loading, "SharedTensors", full)
        assert await rig.publish(1) == DISK
    assert [version for version, _ in rig.told] == [1]
    assert await rig.publish(2) == TENSOR


async def test_a_version_is_shared_again_for_resumed_memory(rig: Rig) -> None:
    held = rig.loader.fetch(Source(3))
    for _ in range(2):
        rig.server.holds = {}
        await rig.loader.load(rig.server, held, flush=True)
    assert rig.server.calls.count(TENSOR) == 2 and not rig.told


@pytest.mark.parametrize(("weights", "path"), [("file", DISK), ("tensor", TENSOR)])
async def test_other_transports_share_nothing(tmp_path: Path, weights: str, path: str) -> None:
    one = Rig(tmp_path, weights)
    try:
        assert await one.publish(1) == path
        assert not one.told
    finally:
        one.loader.close()
