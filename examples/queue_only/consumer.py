"""Trains on scored samples of the queue in the folder ./queue until none come for 5 s. Kill it and start it again."""

import os

from relax_rt.transport import TransferQueue
from relax_rt.transport.queue.loader.plan import Packing
from relax_rt.transport.rpc.errors import DeadlineExceeded

with TransferQueue.connect("queue").blocking() as queue:
    # A batch that ended is not granted again: a trainer that starts anew reads a stream of its own.
    options = {"stream": f"train@{os.getpid()}", "samples": 16, "length": "tokens", "wait_s": 5}
    with queue.steps.loader("train", packing=Packing(max_tokens=160), **options) as loader:
        try:
            for step in loader:  # the next one is taken meanwhile
                for micro in step:
                    tokens, offsets = micro.packed("tokens")  # ragged, without padding
                    reward = micro.stacked("reward").mean()
                    print(f"{len(micro)} samples, {len(tokens)} tokens, mean reward {reward:.1f}", flush=True)
        except DeadlineExceeded:
            print("no more samples")
