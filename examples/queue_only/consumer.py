"""Takes scored samples from the queue of the folder ./queue until 160 have come. Kill it: what it had is offered again."""

from relax_rt.transport import TransferQueue

with TransferQueue.connect("queue").blocking() as queue:
    seen = 0
    while seen < 160:
        batch = queue.take("train", samples=16, wait_s=30)
        tokens, offsets = batch.packed("tokens")  # ragged, without padding; views of single samples are free of copies
        print(f"trained on {len(batch)} samples, {len(tokens)} tokens, mean reward {batch.column('reward').mean():.1f}")
        queue.done(batch)
        seen += len(batch)
