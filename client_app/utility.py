"""PropFair's loss transform: clients minimise the negative logarithm of their utility ``M - loss``."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Utility:
    """Transform of one mini-batch's mean loss.

    Parameters
    ----------
    baseline : float
        M > 0, the loss at which the utility is zero.
    margin : float
        Smallest utility, > 0, at which the logarithm is used.
    fallback : {"linear", "huber"}
        Slope below the margin: ``1 / baseline``, or ``1 / margin``, which continues the logarithm's slope.
    """

    baseline: float
    margin: float
    fallback: str = "linear"

    def __post_init__(self) -> None:
        if not (0 < self.margin <= self.baseline < float("inf")) or self.fallback not in ("linear", "huber"):
            raise ValueError(f"not a utility: {self}")

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the transformed loss, differentiable."""
        if self.baseline - loss.item() >= self.margin:
            return -torch.log1p(-loss / self.baseline)
        return loss / (self.margin if self.fallback == "huber" else self.baseline)
