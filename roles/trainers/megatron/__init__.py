"""Trainer backend on Megatron-Core: tensor, pipeline, expert, sequence and data parallelism, distributed optimizer.

`shims` lets it run without CUDA; `model` builds a GPTModel from a Hugging Face config.json; `weights` fills it from
Hugging Face files and gives it back by Hugging Face names; `packs` and `logprobs` are the forward pass; `state` and
`blocks` are the optimizer's state in checkpoints that any other division can read; `backend` is one rank of it all,
`gang` the rank that speaks for the others.
"""
