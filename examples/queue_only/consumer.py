"""Trains on scored samples of the queue in the folder ./queue until none come for 5 s. Kill it and start it again."""

import numpy as np

from relax_rt.transport import TransferQueue
from relax_rt.transport.queue.samplers.packing import pack_by_tokens

with TransferQueue.connect("queue").blocking() as queue:
    while batch := queue.lease("train", samples=16, wait_s=5):
        samples = batch.samples
        for micro in pack_by_tokens([len(sample["tokens"]) for sample in samples], 160):
            tokens = np.concatenate([samples[at]["tokens"] for at in micro])  # ragged, without padding
            reward = np.mean([samples[at]["reward"] for at in micro])
            print(f"{len(micro)} samples, {len(tokens)} tokens, mean reward {reward:.1f}", flush=True)
        queue.complete(batch)
    print("no more samples")
