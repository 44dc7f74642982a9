"""One GRPO loop over a queue: rollout, reward, advantage and training, each by keys, fields and tags.

The import below is all that differs from the same program on the transferqueue package.
"""

import torch
from tensordict import NonTensorStack, TensorDict

import relax_rt.transport.compat.transfer_queue as tq

PROMPTS = ["1+1=", "2+3=", "4+4="]
ANSWERS = ["2", "5", "8"]
SAMPLES = 4
STEPS = 2


def rollout(step: int, generator: torch.Generator) -> None:
    """Generate a group of completions for each prompt: ragged token ids, their text, and what the trainer balances."""
    partition = f"train@{step}"
    for number, prompt in enumerate(PROMPTS):
        lengths = torch.randint(2, 9, (SAMPLES,), generator=generator).tolist()
        tokens = [torch.randint(10, (n,), generator=generator) for n in lengths]
        fields = TensorDict(
            {
                "tokens": torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
                "text": NonTensorStack(*(prompt + "".join(map(str, ids.tolist())) for ids in tokens)),
            },
            batch_size=SAMPLES,
        )
        keys = [f"{step}/{number}/{sample}" for sample in range(SAMPLES)]
        tags = [{"prompt": number, "total_lengths": n, "status": "generated"} for n in lengths]
        tq.kv_batch_put(keys=keys, partition_id=partition, fields=fields, tags=tags)


def reward(partition: str) -> None:
    """Score each sample as it is found by its tags; put the score and its reason beside the tokens."""
    for key, tags in tq.kv_list(partition)[partition].items():
        if tags["status"] != "generated":
            continue
        text = tq.kv_batch_get(key, partition, select_fields="text")["text"][0]
        right = ANSWERS[tags["prompt"]] in text.split("=")[1]
        fields = {"reward": torch.tensor(float(right)), "why": {"right": right, "text": text}}
        tq.kv_put(key=key, partition_id=partition, fields=fields, tag={"status": "scored"})


def advantage(partition: str) -> tq.KVBatchMeta:
    """Rewards of a group against its mean."""
    metas = []
    keys = list(tq.kv_list(partition)[partition])
    for start in range(0, len(keys), SAMPLES):
        group = keys[start : start + SAMPLES]
        rewards = tq.kv_batch_get(group, partition, select_fields=["reward"])["reward"]
        centred = rewards - rewards.mean()
        fields = TensorDict({"advantage": centred / (centred.std() + 1e-6)}, batch_size=len(group))
        metas.append(tq.kv_batch_put(group, partition, fields=fields))
    return tq.KVBatchMeta.concat(metas)


def train(meta: tq.KVBatchMeta, weights: torch.Tensor) -> float:
    """A step over micro-batches: each token's weight moves with its sample's advantage."""
    loss = torch.zeros(())
    for part in meta.chunk(3):
        data = tq.kv_batch_get_by_meta(part, ["tokens", "advantage"])
        for tokens, gain in zip(data["tokens"].unbind(), data["advantage"], strict=True):
            weights.index_add_(0, tokens, gain.expand(len(tokens)) / 10)
            loss -= gain * weights[tokens].mean()
    return float(loss)


def main() -> None:
    """Two steps; each is cleared when it was trained on."""
    tq.init()
    generator, weights = torch.Generator().manual_seed(7), torch.zeros(10)
    for step in range(STEPS):
        partition = f"train@{step}"
        rollout(step, generator)
        reward(partition)
        meta = advantage(partition)
        loss = train(meta, weights)
        scored = [tags["status"] for tags in tq.kv_list(partition)[partition].values()].count("scored")
        print(f"step {step}: {meta.size} samples, {scored} scored, fields {', '.join(meta.fields)}, loss {loss:.4f}")
        tq.kv_clear(meta.keys, partition)
    left = sum(len(keys) for keys in tq.kv_list().values())
    print(f"weights {[round(x, 3) for x in weights.tolist()]}, {left} samples left")
    tq.close()


if __name__ == "__main__":
    main()
