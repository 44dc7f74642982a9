"""GPUs: names, and the wait for memory of the dead. There is no GPU here: a stand-in answers for nvidia-smi."""

from __future__ import annotations

from typing import Any

import pytest

from relax_rt.supervision.devices import (
    DeviceBusy,
    DeviceGate,
    DeviceProcess,
    DeviceQueryFailed,
    ask_nvidia_smi,
    device_environment,
    device_names,
    parse_apps,
)

DEAD, LIVING = 111, 222


class StandIn:
    """Answers for nvidia-smi: what the devices hold is taken from a list, answer by answer; the last one stays."""

    def __init__(self, *answers: list[DeviceProcess] | str) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, device: str) -> list[DeviceProcess]:
        self.asked.append(device)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, str):
            raise DeviceQueryFailed(answer)
        return answer


class Gate:
    def __init__(
        self,
        *answers: list[DeviceProcess] | str,
        within_s: float = 5.0,
        visible: str | None = None,
        knows_pids: bool = True,
    ) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.smi = StandIn(*answers)
        self.gate = DeviceGate(
            lambda kind, **fields: self.events.append((kind, fields)),
            self.smi,
            visible,
            lambda pid: pid == LIVING,
            within_s,
            lambda: knows_pids,
        )


def test_devices_are_those_that_the_agent_may_see() -> None:
    assert device_names([0, 1], None) == ["0", "1"]
    assert device_names([0, 1], "4, 6,7") == ["4", "6"]
    assert device_environment([1], "4,GPU-abc") == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-abc",
    }
    assert device_environment([], "4") == {}


def test_output_of_nvidia_smi_is_parsed() -> None:
    assert parse_apps("123, 456\n 7 , [N/A]\n\nNo running processes found\n") == [
        DeviceProcess(123, 456),
        DeviceProcess(7, 0),
    ]


async def test_first_use_of_a_device_queries_nothing() -> None:
    world = Gate([DeviceProcess(DEAD, 100)])
    await world.gate.free("rollout/0", [0])
    assert world.smi.asked == [] and world.events == []


async def test_memory_of_the_dead_is_waited_for_and_reported_once() -> None:
    held = [DeviceProcess(DEAD, 9000), DeviceProcess(LIVING, 10)]
    world = Gate(held, held, [DeviceProcess(LIVING, 10)], visible="3,5")
    await world.gate.free("rollout/0", [1])
    await world.gate.free("rollout/0", [1])
    assert world.smi.asked == ["5", "5", "5"]
    (event,) = world.events
    assert event == (
        "devices_awaited",
        {"slot": "rollout/0", "reason": "device 5 still holds 9000 MiB of the dead process 111"},
    )


async def test_memory_that_is_never_freed_is_an_error_that_names_the_process() -> None:
    world = Gate([DeviceProcess(DEAD, 9000)], within_s=0.0)
    await world.gate.free("rollout/0", [0])
    with pytest.raises(DeviceBusy, match="device 0 still holds 9000 MiB of the dead process 111"):
        await world.gate.free("rollout/0", [0])


async def test_start_proceeds_when_devices_cannot_be_queried_and_reports_that_once() -> None:
    world = Gate("nvidia-smi is not installed")
    for _ in range(3):
        await world.gate.free("rollout/0", [0])
    assert world.events == [("devices_not_checked", {"slot": "rollout/0", "reason": "nvidia-smi is not installed"})]
    assert world.smi.asked == ["0"]


async def test_pids_of_another_namespace_do_not_count_as_dead() -> None:
    world = Gate([DeviceProcess(DEAD, 9000)], knows_pids=False)
    await world.gate.free("rollout/0", [0])
    await world.gate.free("rollout/0", [0])
    ((kind, event),) = world.events
    assert kind == "devices_not_checked" and "another pid namespace" in event["reason"]


async def test_a_failing_nvidia_smi_is_an_error(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'driver mismatch'\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(DeviceQueryFailed, match="driver mismatch"):
        await ask_nvidia_smi("0")
    program.write_text('#!/bin/sh\necho "$@" >&2\necho "42, 77"\n')
    assert await ask_nvidia_smi("0") == [DeviceProcess(42, 77)]
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(DeviceQueryFailed, match="not installed"):
        await ask_nvidia_smi("0")
