"""A model's parameters as views into one of two flat buffers: one is in use, the other is filled."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.weights.manifest import Layout, layout_of


def model_layout(model: torch.nn.Module, dtype: torch.dtype) -> Layout:
    """Return the layout of the parameters in a flat buffer of `dtype`, tied parameters once. Trainer and engine
    agree."""
    name = str(dtype).removeprefix("torch.")
    return layout_of([(key, name, tuple(p.shape), p.numel() * dtype.itemsize) for key, p in model.named_parameters()])


class FlatWeights:
    """Two flat buffers for a model's weights. Parameters point into the active one; a fetch fills the standby one.

    A swap only changes pointers: nothing is copied while sequences wait. On a GPU a third buffer, in host memory,
    receives what is fetched, and `load` copies it to the device.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        # Walking the modules and making views would take most of the time of a swap: both are done before.
        self._parameters = list(model.parameters())
        self._standby_views: list[torch.Tensor] | None = None
        self.layout = model_layout(model, dtype)
        self._active = self._new(device)
        self._standby: torch.Tensor | None = None
        self._host: torch.Tensor | None = None
        for view, parameter in zip(self._views_of(self._active), self._parameters, strict=True):
            view.copy_(parameter.data)
            parameter.data = view
            parameter.requires_grad_(False)

    def standby(self, *, base: bool = False) -> memoryview:
        """Return the writable bytes that a fetch fills; with `base` they hold the weights in use."""
        if self._device.type == "cpu":
            target = self._standby = self._standby if self._standby is not None else self._new(self._device)
        else:
            target = self._host = self._host if self._host is not None else self._new(torch.device("cpu"))
        if base:
            target.copy_(self._active)
        array: NDArray[np.uint8] = target.numpy()
        return array.data

    def load(self) -> None:
        """Copy a complete fetch to the device."""
        if self._host is not None:
            self._standby = self._standby if self._standby is not None else self._new(self._device)
            self._standby.copy_(self._host)
        if self._standby is not None:
            self._standby_views = self._views_of(self._standby)

    def check(self, layout: Layout) -> None:
        """Refuse a publication of another model before a byte of it is used.

        Raises:
            Refused: a tensor's name, dtype, shape or offset differs.
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
        assert self._standby is not None
        assert self._standby_views is not None
        views, self._standby_views = self._standby_views, None
        # After a release without weights nothing was in use: the next fetch allocates a buffer.
        self._active, self._standby = self._standby, self._active if self._active.numel() else None
        self._point(views)

    def release(self, *, keep: bool = True) -> None:
        """Free all memory on the device, and the buffer that a fetch fills. The weights in use move to host memory,
        unless `keep` is False: then there are none until the next flip."""
        self._standby = self._standby_views = None
        if not keep:
            self._host, self._active = None, torch.empty(0, dtype=torch.uint8)
            for parameter in self._parameters:
                parameter.data = torch.empty(0, dtype=self._dtype)
            return
        if self._device.type == "cpu":
            return
        self._host = self._active.cpu()
        self._active = self._host
        self._point(self._views_of(self._active))

    def resume(self) -> None:
        """Move the weights in use to the device again, if they were kept."""
        if not self._active.numel():
            return
        self._active = self._active.to(self._device)
        self._point(self._views_of(self._active))

    def _point(self, views: list[torch.Tensor]) -> None:
        for view, parameter in zip(views, self._parameters, strict=True):
            parameter.data = view

    def _new(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=device)

    def _views_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return a tensor for each entry of the layout, in the memory of `buffer` (uint8, [layout.nbytes])."""
        return [
            buffer[entry.offset : entry.offset + entry.nbytes].view(self._dtype).view(entry.shape)
            for entry in self.layout.entries
        ]
