"""TRL's GRPOTrainer on a job that end_to_end.py has written down: the same prompts, rewards and optimizer.

Runs under the peers' interpreter; prints one JSON line a step and one an evaluation, as plain_grpo.py does. Seconds
spent in evaluation are not counted. Generation is TRL's own, of the whole batch at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

EVALUATED_AT_ONCE = 64


class Figures(TrainerCallback):
    """Tells each step, evaluates every so many, and ends the training at the target."""

    def __init__(self, job: dict[str, Any], options: argparse.Namespace) -> None:
        self.job, self.options = job, options
        self.trainer: Any = None
        self.tokens, self.rewards, self.spent_s, self.began = 0, [0.0], 0.0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        seconds = time.perf_counter() - self.began
        self.spent_s += seconds
        mean = sum(self.rewards) / len(self.rewards)
        say("step", state.global_step, self.spent_s, step_s=seconds, tokens=self.tokens, reward_mean=mean)
        every = self.options.evaluate_every
        if every and state.global_step % every == 0:
            exact = self.exact()
            say("evaluation", state.global_step, self.spent_s, exact=exact)
            control.should_training_stop = control.should_training_stop or exact >= self.options.target

    @torch.no_grad()
    def exact(self) -> float:
        """Share of the held-out prompts answered by the right bare number that ends by itself, as ours are."""
        tokenizer, model = self.trainer.processing_class, self.trainer.model
        items, right = self.job["held_out"][: self.options.items], 0
        model.eval()
        for at in range(0, len(items), EVALUATED_AT_ONCE):
            part = items[at : at + EVALUATED_AT_ONCE]
            batch = tokenizer(
                [item["prompt"] for item in part],
                return_tensors="pt",
                padding=True,
                padding_side="left",
                add_special_tokens=False,
            )
            with autocast(self.options.dtype):
                found = model.generate(
                    **batch,
                    do_sample=True,
                    temperature=self.job["temperature"],
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=self.job["max_new_tokens"],
                )[:, batch["input_ids"].shape[1] :]
            for item, row in zip(part, found.tolist(), strict=True):
                text = tokenizer.decode(row, skip_special_tokens=True).strip()
                stopped = tokenizer.eos_token_id in row
                right += stopped and bool(re.fullmatch(r"[+-]?\d+", text)) and int(text) == int(item["answer"])
        model.train()
        return right / len(items)


def say(kind: str, step: int, spent_s: float, **fields: float) -> None:
    """One record on the standard output."""
    print(json.dumps({"kind": kind, "step": step, "elapsed_s": spent_s, **fields}), flush=True)


def autocast(dtype: str) -> Any:
    """What TRL computes under."""
    return torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else contextlib.nullcontext()


def reward_of(job: dict[str, Any], figures: Figures) -> Callable[..., list[float]]:
    """The user's reward function as TRL wants it."""
    path, _, name = job["reward"].rpartition(":")
    spec = importlib.util.spec_from_file_location("users_reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function, most = getattr(module, name), job["max_new_tokens"]

    def reward(completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        eos = figures.trainer.processing_class.eos_token_id
        ended = [eos in ids or len(ids) < most for ids in completion_ids]
        scores = [
            function(text, one, finish_reason="stop" if stopped else "length")
            for text, one, stopped in zip(completions, answer, ended, strict=True)
        ]
        figures.tokens = sum(len(ids) for ids in completion_ids)
        figures.rewards = [sum(score.values()) if isinstance(score, dict) else float(score) for score in scores]
        return figures.rewards

    return reward


def settings(job: dict[str, Any], options: argparse.Namespace, folder: str) -> GRPOConfig:
    """The job in TRL's words; what is not the job's is what was seen to be fastest on a CPU."""
    batch = job["group_size"] * job["prompts_per_step"]
    assert batch % options.micro_batch == 0, "the micro-batch must divide the batch"
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=options.dtype == "bfloat16",
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=batch // options.micro_batch,
        generation_batch_size=batch,
        num_generations=job["group_size"],
        max_completion_length=job["max_new_tokens"],
        temperature=job["temperature"],
        top_k=0,
        top_p=1.0,
        shuffle_dataset=False,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=job["adam_betas"][0],
        adam_beta2=job["adam_betas"][1],
        weight_decay=job["weight_decay"],
        max_grad_norm=job["max_grad_norm"],
        optim="adamw_torch_fused",
        beta=0.0,
        epsilon=job["clip_low"],
        epsilon_high=job["clip_high"],
        loss_type="dapo",
        scale_rewards="group" if job["normalise_std"] else "none",
        mask_truncated_completions=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        seed=job["seed"],
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path, help="what end_to_end.py has written")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True, help="of autocast")
    parser.add_argument("--micro-batch", type=int, required=True, help="samples of one backward pass")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--evaluate-every", type=int, default=0)
    parser.add_argument("--items", type=int, default=512)
    parser.add_argument("--target", type=float, default=2.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    job = json.loads(options.job.read_text())
    tokenizer = AutoTokenizer.from_pretrained(job["model"], local_files_only=True)
    for item in job["train"][:64]:
        assert tokenizer(item["prompt"], add_special_tokens=False)["input_ids"] == item["tokens"], "other tokens"
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    rows = [{"prompt": item["prompt"], "answer": item["answer"]} for item in job["train"]]
    figures = Figures(job, options)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(sys.stderr):
        figures.trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward_of(job, figures),
            args=settings(job, options, folder),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[figures],
        )
        figures.trainer.train()


if __name__ == "__main__":
    main()
