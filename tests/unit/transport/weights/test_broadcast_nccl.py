"""How the NCCL communicator waits, aborts and names errors, with a stand-in for CuPy: what NCCL itself does is tested
on a device (tests/gpu)."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.weights import device
from relax_rt.transport.weights.broadcast import backends as meeting
from relax_rt.transport.weights.broadcast.backends import NcclCommunicator, NcclFailed
from relax_rt.transport.weights.broadcast.protocol import DuplicateDevice, PeerLost, Rendezvous
from relax_rt.transport.weights.device import DeviceView

IN_PROGRESS, SYSTEM_ERROR, INVALID_USAGE = 7, 2, 5


class NcclError(RuntimeError):
    """As CuPy's: it knows the first results only, and fails with KeyError on the others."""

    def __init__(self, status: int) -> None:
        self.status = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5}[status]
        super().__init__(f"NCCL_ERROR {status}")


class Library:
    """What NCCL answers, call by call; the last answer stays."""

    def __init__(self) -> None:
        self.answers = [0]
        self.aborted = 0
        self.broadcasts: list[tuple[Any, ...]] = []
        self.stream_done = True
        library = self

        class NcclCommunicator:
            def __init__(self, world: int, unique: tuple[int, ...], rank: int) -> None:
                assert len(unique) == 128 and unique == tuple(range(-64, 64))
                library.answer()

            def check_async_error(self) -> None:
                library.answer()

            def broadcast(self, *arguments: Any) -> None:
                library.broadcasts.append(arguments)
                library.answer()

            def abort(self) -> None:
                library.aborted += 1

        self.module = SimpleNamespace(
            available=True,
            get_version=lambda: 23003,
            get_unique_id=lambda: tuple(range(-64, 64)),
            NcclCommunicator=NcclCommunicator,
            NcclError=NcclError,
            NCCL_UINT8=1,
        )

    def answer(self) -> None:
        status = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if status:
            raise NcclError(status)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()

    class Event:
        def __init__(self, **_: Any) -> None: ...

        def record(self, _: Any) -> None: ...

        @property
        def done(self) -> bool:
            return found.stream_done

    runtime = SimpleNamespace(
        getDeviceCount=lambda: 1, getDeviceProperties=lambda _: {"uuid": b"\x01\x02"}, CUDARuntimeError=OSError
    )
    cuda = SimpleNamespace(
        runtime=runtime,
        nccl=found.module,
        Stream=lambda **_: SimpleNamespace(ptr=99),
        Event=Event,
        Device=lambda *_: SimpleNamespace(id=0, pci_bus_id="0000:01:00.0"),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, __version__="14"))
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    return found


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    store = meeting.dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield Rendezvous("127.0.0.1", store.port, "1")


def joined(rendezvous: Rendezvous) -> NcclCommunicator:
    communicator = NcclCommunicator()
    communicator.init(0, 1, rendezvous, 5.0)
    return communicator


def test_a_call_in_progress_is_looked_after_until_it_is_done(library: Library, rendezvous: Rendezvous) -> None:
    library.answers = [IN_PROGRESS, IN_PROGRESS, 0]
    communicator = joined(rendezvous)
    library.answers = [IN_PROGRESS, 0]
    communicator.broadcast(DeviceView(1000, 64, None).part(16, 48), 0, 5.0)
    assert library.broadcasts == [(1016, 1016, 32, 1, 0, 99)]
    assert "23003" in communicator.software and "non-blocking" in communicator.software


@pytest.mark.parametrize("where", ["init", "call", "stream"])
def test_what_never_ends_is_aborted_at_its_deadline_and_at_once_on_request(
    library: Library, rendezvous: Rendezvous, where: str
) -> None:
    view = DeviceView(1000, 64, None)
    communicator = joined(rendezvous) if where != "init" else NcclCommunicator()

    def wait(timeout_s: float) -> None:
        if where == "init":
            communicator.init(0, 1, rendezvous, timeout_s)
        else:
            communicator.broadcast(view, 0, timeout_s)

    library.answers = [IN_PROGRESS] if where != "stream" else [0]
    library.stream_done = where != "stream"
    with pytest.raises(PeerLost):
        wait(0.05)
    assert library.aborted == 1
    library.answers, library.stream_done = [0], True
    communicator.init(0, 1, Rendezvous(rendezvous.host, rendezvous.port, "2"), 5.0)
    library.answers = [IN_PROGRESS] if where != "stream" else [0]
    library.stream_done = where != "stream"
    begin = time.monotonic()
    timer = threading.Timer(0.05, communicator.abort)
    timer.start()
    with pytest.raises(PeerLost, match="aborted"):
        wait(60.0)
    timer.join()
    assert time.monotonic() - begin < 30 and library.aborted >= 2


@pytest.mark.parametrize(("status", "kind"), [(SYSTEM_ERROR, PeerLost), (INVALID_USAGE, NcclFailed)])
def test_an_error_is_the_peers_or_this_ranks_own(
    library: Library, rendezvous: Rendezvous, status: int, kind: type[Exception]
) -> None:
    communicator = joined(rendezvous)
    library.answers = [IN_PROGRESS, status]
    with pytest.raises(kind):
        communicator.broadcast(DeviceView(1, 2, None), 0, 5.0)
    assert library.aborted == 1


def test_an_error_that_nccl_finds_during_the_copy_ends_the_wait(library: Library, rendezvous: Rendezvous) -> None:
    communicator = joined(rendezvous)
    library.stream_done, library.answers = False, [0, SYSTEM_ERROR]
    begin = time.monotonic()
    with pytest.raises(PeerLost):
        communicator.broadcast(DeviceView(1, 2, None), 0, 60.0)
    assert time.monotonic() - begin < 30


def test_two_ranks_on_one_device_are_refused_before_the_library_is_asked(
    library: Library, rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.answers = [INVALID_USAGE]  # it must not be asked
    failures: list[BaseException] = []

    def first() -> None:
        try:
            NcclCommunicator().init(0, 2, rendezvous, 5.0)
        except (PeerLost, NcclFailed) as error:
            failures.append(error)

    other = threading.Thread(target=first)
    other.start()
    with pytest.raises(DuplicateDevice, match=r"rank 1 on device GPU-0102@0000:01:00.0.*rank 0"):
        NcclCommunicator().init(1, 2, rendezvous, 5.0)
    other.join()
    assert len(failures) == 1, "rank 0 has nobody to meet"


def test_without_cupy_there_is_a_reason_and_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(Refused, match=r"CUDA through CuPy.*pip install cupy"):
        device.cupy()


def test_factors_of_the_device_digest_are_fixed() -> None:
    first = [int(w) for w in device.digest_weights(3)]
    assert first == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F5, 0x06C45D188009454F], "those of splitmix64, made odd"
