"""Linear and embedding layers that know their initial scale.

Every module that owns parameters can draw them again by `reset_parameters()`, also after it was built on the meta
device. torch's own layers would draw from their default distribution then, not from the model's.
"""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """A linear layer with weights from N(0, std^2) and zero biases."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, std: float) -> None:
        self.std = std  # before the base class: it calls reset_parameters
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        """Draw the weights, clear the bias."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding table with entries from N(0, std^2)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float) -> None:
        self.std = std  # before the base class: it calls reset_parameters
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draw the table."""
        nn.init.normal_(self.weight, std=self.std)
