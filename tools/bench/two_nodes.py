"""Two nodes on one machine: a pair of network namespaces with a cable between them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import subprocess
from collections.abc import Iterator

PREFIX = "rlx"


class NotPermitted(Exception):
    """This process may not make network namespaces."""


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Where to run what, and how the one finds the other.

    Attributes:
        first, second: what to put in front of a command so that it runs there.
        host: address of the first as both see it.
        label: what this is, for readers of results.
    """

    first: list[str]
    second: list[str]
    host: str
    label: str


LOOPBACK = Nodes([], [], "127.0.0.1", "loopback, one network namespace")


@contextlib.contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Two namespaces for the length of the block, removed whatever happens to it short of SIGKILL; those that a
    killed process left are removed by the next.

    Raises:
        NotPermitted: with what the system said.
    """
    if os.geteuid() != 0:
        raise NotPermitted("network namespaces are for root")
    _remove_left()
    # Names of namespaces and devices have at most 15 characters.
    names = [f"{PREFIX}{os.getpid()}{end}" for end in "ab"]
    first, second = names
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", f"{first}v", "netns", first, "type", "veth", "peer", "name", f"{second}v", "netns", second)
        for number, name in enumerate(names, 1):
            _ip("-n", name, "addr", "add", f"10.213.77.{number}/24", "dev", f"{name}v")
            _ip("-n", name, "link", "set", f"{name}v", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        run = ["ip", "netns", "exec"]
        yield Nodes([*run, first], [*run, second], "10.213.77.1", "two network namespaces, veth")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def alone(node: list[str]) -> list[str]:
    """For a command that shares no memory and sees no processes of the other node, as on a machine of its own."""
    if not node:
        return []
    mount = 'mount -t tmpfs -o size=1g,mode=1777 tmpfs /dev/shm && exec "$0" "$@"'
    return [*node, "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", mount]


def cut(node: list[str]) -> None:
    """Pull the cable at a node's end."""
    _ip("-n", node[-1], "link", "set", f"{node[-1]}v", "down")


def mend(node: list[str]) -> None:
    """Put the cable back."""
    _ip("-n", node[-1], "link", "set", f"{node[-1]}v", "up")


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], capture_output=True, check=True, text=True)
    except FileNotFoundError as error:
        raise NotPermitted("there is no `ip` command") from error
    except subprocess.CalledProcessError as error:
        raise NotPermitted(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from error


def _remove_left() -> None:
    for path in pathlib.Path("/run/netns").glob(f"{PREFIX}*"):
        found = re.fullmatch(rf"{PREFIX}(\d+)[ab]", path.name)
        if found and not pathlib.Path(f"/proc/{found[1]}").exists():
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True, check=False)
