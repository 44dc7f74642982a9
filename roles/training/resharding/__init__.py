"""From the shards of a Megatron-Core gang to the tensors of a Hugging Face model, in buckets of bounded size."""
