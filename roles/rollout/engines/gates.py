"""The experts that a transformers model sends its tokens to, seen at its gates while it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from relax_rt.roles.rollout.engines.routing import settled, sparse_layers
from relax_rt.transport.rpc.errors import Refused


class Gates:
    """Hooks on a model's gates. Confined to the thread that computes.

    A gate of transformers answers with logits, weights and the experts chosen, int64 [tokens, k]; a pass over
    [sequences, length] asks it once for all tokens, in that order.

    Args:
        model: a causal language model that was loaded from `folder`.

    Raises:
        Refused: the model is dense, or has no gates where they are looked for.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        self.shape, sparse = sparse_layers(folder)
        self._without = [layer for layer, has in enumerate(sparse) if not has]
        self._seen: dict[int, torch.Tensor] = {}
        for layer, block in enumerate(model.base_model.layers):
            if not sparse[layer]:
                continue
            gate = getattr(block.mlp, "gate", None)
            if not isinstance(gate, torch.nn.Module):
                raise Refused(
                    f"routing rows of the model in {folder}",
                    why=f"layer {layer} has no mlp.gate, by which this release of transformers would route",
                    hint="leave roles.rollout.routing out",
                )
            gate.register_forward_hook(self._hook(layer))

    def _hook(self, layer: int) -> Any:
        def see(gate: torch.nn.Module, _: Any, output: Any) -> None:
            experts = output[-1] if isinstance(output, tuple) else output
            if experts.is_floating_point() or experts.shape[-1] != self.shape.chosen:
                raise Refused(
                    f"what {type(gate).__name__} of layer {layer} answers",
                    why=f"it ends with {experts.dtype} {list(experts.shape)}, not with {self.shape.chosen} experts",
                    hint="leave roles.rollout.routing out with this release of transformers",
                )
            self._seen[layer] = experts

        return see

    def take(self, sequences: int) -> NDArray[np.int16]:
        """What was chosen in the pass that has just ended, [sequences, length, layers, k], padding included."""
        seen, self._seen = self._seen, {}
        tokens = next(iter(seen.values())).shape[0]
        found = np.zeros((tokens, self.shape.layers, self.shape.chosen), np.int16)
        layers = list(seen)
        found[:, layers] = torch.stack([seen[layer] for layer in layers], dim=1).to(torch.int16).cpu().numpy()
        return settled(found, self._without).reshape(sequences, -1, self.shape.layers, self.shape.chosen)
