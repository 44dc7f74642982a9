"""A producer streams samples in; two data-parallel ranks, with two readers each, take them as they come.

The import below is all that differs from the same program on the transferqueue package.
"""

import asyncio
import os
import threading

import torch

import relax_rt.transport.compat.transfer_queue as tq

SAMPLES, BATCH, MICRO = 24, 4, 2
RANKS, REPLICAS = 2, 2
# Consumers see from the beginning how many samples the partition will have.
os.environ["TQ_PRE_ALLOC_SAMPLE_NUM"] = str(SAMPLES)


async def produce() -> None:
    """Put samples one by one, as they are generated, each with its score a little later."""
    for number in range(SAMPLES):
        tokens = torch.arange(1 + number % 5) + 100 * number
        await tq.async_kv_put(key=f"s{number}", partition_id="train", fields={"tokens": tokens}, tag={"n": number})
        if number % 3 == 2:
            scored = [f"s{n}" for n in range(number - 2, number + 1)]
            await asyncio.gather(
                *(tq.async_kv_put(key, "train", fields={"score": torch.tensor(len(key) / 2)}) for key in scored)
            )


def consume(conf: object, rank: int, found: list[list[list[int]]]) -> None:
    """What one process of rank `rank` reads: the first token of each sample, by micro-batch."""
    dataset = tq.StreamingDataset(
        config=conf,
        batch_size=BATCH,
        micro_batch_size=MICRO,
        data_fields=["tokens", "score"],
        partition_id="train",
        task_name="update_actor",
        dp_rank=rank,
        should_check_consumption_status=False,
    )
    loader = tq.StreamingDataLoader(dataset, num_workers=0)
    for data, meta in loader:
        assert meta.size == data.batch_size[0] == MICRO
        assert data["score"].shape == (MICRO,)
        found.append([int(tokens[0]) // 100 for tokens in data["tokens"].unbind()])
        if len(found) == SAMPLES // RANKS // MICRO:
            return


def main() -> None:
    """Start all of them and compare what they read."""
    conf = tq.init({"controller": {"sampler": "RankAwareSampler", "polling_mode": True}})
    found: dict[tuple[int, int], list[list[int]]] = {
        (rank, replica): [] for rank in range(RANKS) for replica in range(REPLICAS)
    }
    readers = [threading.Thread(target=consume, args=(conf, rank, read)) for (rank, _), read in found.items()]
    for reader in readers:
        reader.start()
    asyncio.run(produce())
    for reader in readers:
        reader.join()
    for rank in range(RANKS):
        same = all(found[rank, replica] == found[rank, 0] for replica in range(REPLICAS))
        print(f"rank {rank}: {len(found[rank, 0])} micro-batches, the same in all its processes: {same}")
    read = sorted(n for rank in range(RANKS) for micro in found[rank, 0] for n in micro)
    print(f"each sample once: {read == list(range(SAMPLES))}")
    print(f"all consumed: {tq.get_client().check_consumption_status('update_actor', 'train')}")
    tq.close()


if __name__ == "__main__":
    main()
