"""Trainer backend on Megatron-Core: tensor, pipeline, expert, sequence and data parallelism, distributed optimizer.

- `backend`: one rank of the backend
- `ranks`, `shims`: process groups; Megatron-Core without CUDA
- `model`, `passes`: the GPTModel, and forward and backward passes of packed micro-batches
- `layout`, `resharding`: which rows of which Hugging Face tensors a rank holds; bringing them to rank 0
- `state`: parameters and optimizer state in checkpoints that any other division can read
"""
