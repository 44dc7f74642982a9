"""Parts of the torch backend: ranks that share a model (FSDP2), adapters, and what is done when memory runs out."""
