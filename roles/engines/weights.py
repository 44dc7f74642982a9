"""A model's parameters as views into one flat buffer, twice: one that is used, one that is filled."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from relax_rt.transport.errors import Refused
from relax_rt.transport.weights.manifest import Layout, TensorEntry, layout_of


def model_layout(model: torch.nn.Module, dtype: torch.dtype) -> Layout:
    """Where each parameter lies in a flat buffer of `dtype`; tied parameters once. Same on trainer and engine."""
    name = str(dtype).removeprefix("torch.")
    return layout_of([(key, name, tuple(p.shape), p.numel() * dtype.itemsize) for key, p in model.named_parameters()])


class FlatWeights:
    """Two flat buffers for a model's weights. Parameters point into the active one; a fetch fills the standby one.

    A swap only moves pointers, so it costs no copy while sequences wait.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        self.layout = model_layout(model, dtype)
        self._buffers = [torch.zeros(self.layout.nbytes, dtype=torch.uint8) for _ in range(2)]
        self._active = 0
        for entry, parameter in zip(self.layout.entries, model.parameters(), strict=True):
            view = self._view(0, entry)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.requires_grad_(False)

    def standby(self) -> memoryview:
        """The bytes of the buffer that is not in use, writable."""
        array: NDArray[np.uint8] = self._buffers[1 - self._active].numpy()
        return array.data

    def check(self, layout: Layout) -> None:
        """Refuse a publication of another model before a byte of it is used.

        Raises:
            Refused: a tensor's name, dtype, shape or place differs.
        """
        if layout.entries == self.layout.entries:
            return
        ours = {e.name: e for e in self.layout.entries}
        odd = next((e for e in layout.entries if ours.get(e.name) != e), None)
        raise Refused(
            f"published weights do not fit this engine: {odd or 'tensors are missing'}",
            why=f"the engine has {ours.get(odd.name) if odd else sorted(set(ours) - {e.name for e in layout.entries})}",
            hint="trainer and engines must load the same model and dtype",
        )

    def flip(self) -> None:
        """Point the parameters at the standby buffer."""
        self._active = 1 - self._active
        for entry, parameter in zip(self.layout.entries, self._model.parameters(), strict=True):
            parameter.data = self._view(self._active, entry)

    def _view(self, buffer: int, entry: TensorEntry) -> torch.Tensor:
        raw = self._buffers[buffer][entry.offset : entry.offset + entry.nbytes]
        return raw.view(self._dtype).view(entry.shape)
