"""The same GRPO in one plain process: the peer of the addition job in `end_to_end.py`.

Same model, prompts, rewards, loss, batch and learning rate as a roles.toml, written as one loop: sample the whole batch
with a KV cache, score, train in padded micro-batches, copy the weights to the sampling model. It prints one JSON line a
step and one an evaluation; seconds spent in evaluation are not counted. With --late each step but the first trains on
samples of the weights before the last update.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from relax_rt.config.loader import load_config
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.data.source import PromptSource
from relax_rt.roles.evaluation.scoring import evaluate
from relax_rt.roles.models.forward import cache_keyword
from relax_rt.roles.models.resolve import resolve_model
from relax_rt.roles.models.tokenizer import load_tokenizer
from relax_rt.roles.rewards.library.functions import load_reward
from relax_rt.roles.rewards.scoring import Caller, Failed, Request, ThreadScorer
from relax_rt.roles.rollout.engines.settings import RolloutSettings
from relax_rt.roles.training.algorithms.advantages import group_advantages
from relax_rt.roles.training.algorithms.losses import DecoupledOptions
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.settings import learning_rate
from relax_rt.roles.training.backend.settings import TrainerSettings

MICRO_BATCH = 16


@dataclass
class Batch:
    """Left-padded prompts [b, p], their mask, sampled tokens [b, n] (-1 after the end), their log-probabilities when
    sampled [b, n], rewards [prompts, group]."""

    ids: torch.Tensor
    mask: torch.Tensor
    out: torch.Tensor
    old: torch.Tensor
    rewards: np.ndarray


class Plain:
    """A model that trains in float32, with bfloat16 autocast if the job's trainer has that dtype, and its copy of the
    rollouts' dtype that samples."""

    def __init__(self, config: RLConfig, threads: int, *, late: bool = False) -> None:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(True)
        torch.manual_seed(config.run.seed)
        self.config, self.late = config, late
        self.waiting: Batch | None = None
        folder = resolve_model(config.model.path, Path(config.config_dir))
        self.tokenizer = load_tokenizer(folder)
        self.source = PromptSource.load(
            config.data, self.tokenizer, seed=config.run.seed, config_dir=Path(config.config_dir)
        )
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        trainer, rollout = config.role("trainer", TrainerSettings), config.role("rollout", RolloutSettings)
        self.autocast = trainer.dtype == "bfloat16"
        self.sampler = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, rollout.dtype)).eval()
        table = config.algorithm
        parts = Objective.of(table, base=Path(config.config_dir)).parts
        if not isinstance(parts.loss.options, DecoupledOptions) or table.updates_per_step > 1:
            raise SystemExit("the plain process has decoupled_ppo, with one update a step: the job's loss is another")
        self.advantage, self.weight_cap = parts.advantage.options, parts.loss.options.weight_cap
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            table.learning_rate,
            betas=table.adam_betas,
            weight_decay=table.weight_decay,
            fused=True,
        )
        function = load_reward(str(config.reward.function), Path(config.config_dir))
        self.scorer = ThreadScorer(Caller(function, config.reward.timeout_s), config.reward.timeout_s)
        self.stops = torch.tensor(sorted(self.tokenizer.stop_ids))

    @torch.no_grad()
    def generate(self, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Left-padded prompts [b, p], their mask, sampled tokens [b, n] (-1 after the end), their log-probabilities."""
        width = max(len(p) for p in prompts)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        position = (mask.cumsum(1) - 1).clamp(min=0)
        cache, current, seen = DynamicCache(config=self.sampler.config), ids, mask
        keyword = cache_keyword(self.sampler)
        done = torch.zeros(len(prompts), dtype=torch.bool)
        tokens, logprobs = [], []
        for _ in range(self.config.sampling.max_new_tokens):
            out = self.sampler(
                current,
                attention_mask=seen,
                position_ids=position,
                use_cache=True,
                logits_to_keep=1,
                **{keyword: cache},
            )
            lp = torch.log_softmax(out.logits[:, -1].float() / self.config.sampling.temperature, -1)
            token = torch.multinomial(lp.exp(), 1)[:, 0]
            tokens.append(torch.where(done, -1, token))
            logprobs.append(lp.gather(1, token[:, None])[:, 0])
            done = done | torch.isin(token, self.stops)
            current, position = token[:, None], position[:, -1:] + 1
            seen = torch.cat([seen, torch.ones(len(prompts), 1, dtype=seen.dtype)], 1)
            if bool(done.all()):
                break
        return ids, mask, torch.stack(tokens, 1), torch.stack(logprobs, 1)

    def text(self, row: torch.Tensor) -> tuple[str, bool]:
        """A completion's text and whether it ended by itself."""
        tokens = [int(t) for t in row if t >= 0]
        return self.tokenizer.decode(tokens), bool(tokens) and tokens[-1] in self.tokenizer.stop_ids

    async def rewards(self, items: list[Any], out: torch.Tensor) -> np.ndarray:
        """The user's reward function over the batch."""
        requests = []
        for item, row in zip(items, out, strict=True):
            text, stopped = self.text(row)
            info = {**item.info, "finish_reason": "stop" if stopped else "length", "truncated": not stopped}
            requests.append(Request(text, item.answer, info))
        scores = await self.scorer.score(requests)
        values = [0.0 if isinstance(score, Failed) else score.total for score in scores]
        return np.array(values)

    def sample(self, number: int) -> Batch:
        """The batch of a step, of the weights that the sampler has now."""
        table = self.config.algorithm
        first = (number - 1) * table.prompts_per_step
        items = [self.source.prompt(first + i) for i in range(table.prompts_per_step) for _ in range(table.group_size)]
        ids, mask, out, old = self.generate([i.tokens for i in items])
        rewards = asyncio.run(self.rewards(items, out)).reshape(table.prompts_per_step, table.group_size)
        return Batch(ids, mask, out, old, rewards)

    def step(self, number: int) -> dict[str, Any]:
        """One GRPO step. Late, the batch of the next one is sampled before the weights of this one are there."""
        table, began = self.config.algorithm, time.perf_counter()
        batch = self.waiting if self.waiting is not None else self.sample(number)
        if self.late and number < table.steps:
            self.waiting = self.sample(number + 1)
        by_std = self.advantage.normalise_std
        advantages = np.stack([group_advantages(r, normalise_std=by_std) for r in batch.rewards]).reshape(-1)
        generated = time.perf_counter()
        self._train(number, batch, torch.tensor(advantages, dtype=torch.float32))
        with torch.no_grad():
            for copy, master in zip(self.sampler.parameters(), self.model.parameters(), strict=True):
                copy.copy_(master)
        ended = time.perf_counter()
        return {
            "step": number,
            "reward_mean": float(batch.rewards.mean()),
            "samples": len(batch.out),
            "tokens": int((batch.out >= 0).sum()),
            "generate_s": generated - began,
            "train_s": ended - generated,
            "step_s": ended - began,
        }

    def _train(self, number: int, batch: Batch, advantages: torch.Tensor) -> None:
        table = self.config.algorithm
        total = int((batch.out >= 0).sum())
        kept = advantages.abs().gt(1e-6).nonzero()[:, 0]
        for rows in kept.split(MICRO_BATCH) if len(kept) else ():
            part = batch.out[rows]
            live = (part >= 0).float()
            full = torch.cat([batch.ids[rows], part.clamp(min=0)], 1)
            seen = torch.cat([batch.mask[rows], live.long()], 1)
            position = (seen.cumsum(1) - 1).clamp(min=0)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                logits = self.model(
                    full, attention_mask=seen, position_ids=position, logits_to_keep=part.shape[1] + 1
                ).logits[:, :-1]
            lp = torch.log_softmax(logits.float() / self.config.sampling.temperature, -1)
            lp = lp.gather(-1, part.clamp(min=0)[..., None])[..., 0]
            each = self._loss((lp - batch.old[rows]).masked_fill(live == 0, 0.0), advantages[rows, None] * live)
            (each.sum() / total).backward()
        if len(kept):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(table, number, table.steps)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), table.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)

    def _loss(self, log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Of each token, by decoupled PPO, from its log-probability less that of when it was sampled."""
        # One update a batch: the proximal policy is the one that is trained, and its ratio 1.
        weight = log_ratio.detach().exp()
        weight = weight.masked_fill(weight > self.weight_cap, 0.0)
        return -weight * (log_ratio - log_ratio.detach()).exp() * advantages

    def evaluate(self, count: int) -> dict[str, Any]:
        """Held-out accuracy, with the same scoring as the evaluator role."""
        items = self.source.held_out[:count]
        texts = []
        for at in range(0, len(items), 64):
            _, _, out, _ = self.generate([i.tokens for i in items[at : at + 64]])
            texts += [self.text(row) for row in out]
        return dict(evaluate([t for t, _ in texts], [i.answer for i in items], [s for _, s in texts], None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--evaluate-every", type=int, default=0)
    parser.add_argument("--items", type=int, default=512, help="held-out items of an evaluation")
    parser.add_argument("--target", type=float, default=2.0, help="stop at this held-out exact match")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the config")
    parser.add_argument("--late", action="store_true", help="train on samples one update old")
    args = parser.parse_args()
    config = load_config(args.config, args.set)
    assert isinstance(config, RLConfig)
    plain = Plain(config, args.threads, late=args.late)
    spent = 0.0
    for number in range(1, args.steps + 1):
        record = plain.step(number)
        spent += record["step_s"]
        print(json.dumps({"kind": "step", "elapsed_s": spent, **record}), flush=True)
        if args.evaluate_every and number % args.evaluate_every == 0:
            scores = plain.evaluate(args.items)
            print(json.dumps({"kind": "evaluation", "step": number, "elapsed_s": spent, **scores}), flush=True)
            if scores["exact"] >= args.target:
                return


if __name__ == "__main__":
    main()
