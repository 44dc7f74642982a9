"""Trainer backend on Megatron-Core: tensor, pipeline, expert, sequence and data parallelism, distributed optimizer.

`shims` lets it run without CUDA; `ranks` joins the process groups; `model` builds a GPTModel from a Hugging Face
config.json, and `weights` fills it from Hugging Face files; `packs`, `passes` and `logprobs` are the forward and
backward pass; `state` and `blocks` are the optimizer's state in checkpoints that any other division can read;
`backend` is one rank of it all; `orders` and `gang` make one backend of all ranks, and `start` does so in a run.
`limits` says what is only planned.
"""
