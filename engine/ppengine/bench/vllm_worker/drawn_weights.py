"""Part of vLLM's worker processes: dummy weights drawn as the engine draws its own. It imports nothing of this package.

A card at its power limit has a lower clock for some numbers than for others. vLLM's dummy weights are below 0.001,
norms included, so that all attention weights are about equal: an H100 runs long prompts 2 % faster with those.
"""

from __future__ import annotations

from typing import Any


class DrawnWeights:
    """Methods that vLLM's worker gets by `worker_extension_cls`."""

    model_runner: Any

    def draw_weights(self, scale: float) -> int:
        """Fill the parameters of this worker's part of the model, and return how many there are."""
        import torch

        count = 0
        with torch.no_grad():
            for name, parameter in self.model_runner.model.named_parameters():
                if parameter.is_floating_point():
                    count += 1
                    parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, scale)
        return count
