"""Bytes and tensors between processes: messages, shared memory, the TransferQueue, weight publication."""

if __name__ != "relax_rt.transport":
    raise ImportError(f"import relax_rt.transport, not {__name__}: the short name belongs to your own code")
