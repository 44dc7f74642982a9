"""A queue between two nodes that share nothing but a cable: network, shared memory and processes of their own."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import queue_node_end
from netns import Nodes, alone
from queue_node_end import SAMPLES


@contextlib.contextmanager
def process(node: list[str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [*alone(node), sys.executable, queue_node_end.__file__, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def line(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return running.stdout.readline().strip()


def test_samples_go_to_another_node_and_rewards_come_back(nodes: Nodes, tmp_path: pathlib.Path) -> None:
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(process(nodes.first, "host", str(tmp_path / "queue"), f"tcp://{nodes.host}:0"))
        address = line(host)
        assert address.startswith(f"tcp://{nodes.host}:")
        worker = stack.enter_context(process(nodes.second, "worker", address, str(tmp_path / "queue" / "keys.json")))
        judged, tokens_bytes = map(float, line(worker).split())
        total, reward_bytes = map(float, line(host).split())
        assert judged == SAMPLES and total == sum(n * 0.5 for n in range(SAMPLES))
        # Both directions went over the wire, and nothing twice that a lease shares.
        assert tokens_bytes >= SAMPLES * queue_node_end.TOKENS * 4
        assert reward_bytes >= SAMPLES * queue_node_end.REWARDS * 8
