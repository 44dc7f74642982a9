"""Takes scored samples from the queue of the folder ./queue until none come for 5 s. Kill it and start it again."""

from relax_rt.transport import TransferQueue

with TransferQueue.connect("queue").blocking() as queue:
    while batch := queue.take("train", samples=16, wait_s=5):
        tokens, offsets = batch.packed("tokens")  # ragged, without padding: views into shared memory
        reward = batch.column("reward").mean()
        print(f"trained on {len(batch)} samples, {len(tokens)} tokens, mean reward {reward:.1f}", flush=True)
        queue.done(batch)
