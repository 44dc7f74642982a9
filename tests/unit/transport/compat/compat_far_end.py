"""A process of a job of the interface's users: it finds the queue by the environment.

``python compat_far_end.py put|get|hold|sum``: one action, then a word on standard output.
"""

from __future__ import annotations

import sys
import time

import torch
from tensordict import TensorDict

import relax_rt.transport.compat.transfer_queue as tq

KEYS = [f"far{n}" for n in range(64)]


def main() -> None:
    action = sys.argv[1]
    if action == "put":
        tq.init()
        fields = TensorDict({"x": torch.arange(64 * 2048.0).reshape(64, 2048)}, batch_size=64)
        tq.kv_batch_put(KEYS, "far", fields, [{"by": "far end"}] * 64)
        print("put", flush=True)  # noqa: T201
    elif action == "hold":
        data = tq.kv_batch_get(KEYS, "far")
        print("holding", flush=True)  # noqa: T201
        time.sleep(600)
        print(data)  # noqa: T201
    elif action == "start":
        tq.init({"relax": {"folder": sys.argv[2]}})
        tq.kv_put("k", "p", fields={"x": torch.ones(1)})
        print("started", flush=True)  # noqa: T201
        time.sleep(600)


if __name__ == "__main__":
    main()
