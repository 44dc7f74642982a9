"""Ray, seen from outside: how long until it is there, eight actors answer, and a killed one answers again.

Runs under the peers' interpreter and prints one JSON object. The actor imports what a trainer imports; it is killed
with SIGKILL, restarted by Ray (max_restarts=-1), and the call that was lost is repeated by Ray (max_task_retries=-1).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import ray


def main(kills: int, module: str) -> None:
    began = time.perf_counter()
    ray.init(num_cpus=16, log_to_driver=False, include_dashboard=False)
    started_s = time.perf_counter() - began

    @ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0)
    class Actor:
        def __init__(self, module: str) -> None:
            if module:
                __import__(module)

        def pid(self) -> int:
            return os.getpid()

    began = time.perf_counter()
    ray.get([actor.pid.remote() for actor in [Actor.remote("") for _ in range(8)]])
    eight_s = time.perf_counter() - began
    restarts = {}
    for name in ("", module):
        actor = Actor.remote(name)
        restarts[name or "nothing"] = [kill(actor) for _ in range(kills)]
    print(json.dumps({"init_s": started_s, "eight_actors_s": eight_s, "restart_s": restarts}))
    ray.shutdown()


def kill(actor) -> float:  # type: ignore[no-untyped-def]
    """Seconds from SIGKILL until another process answers."""
    old = ray.get(actor.pid.remote())
    os.kill(old, signal.SIGKILL)
    began = time.perf_counter()
    while ray.get(actor.pid.remote()) == old:
        pass
    return time.perf_counter() - began


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
