"""The optimiser: Muon for the matrices of the layers, AdamW for the embedding and the norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest matrices `[n, rows, columns]` with singular values near one, by five Newton-Schulz steps."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Momentum whose every step is an orthogonal matrix (Jordan), for parameters of two dimensions."""

    def __init__(self, parameters: Iterable[nn.Parameter], rate: float, decay: float) -> None:
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            self.groups[tuple(parameter.shape)].append(parameter)
        self.momenta = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}
        self.rate, self.decay = rate, decay

    def step(self, scale: float, momentum: float = 0.95) -> None:
        """One update at `scale` times the base rate; matrices of one shape are handled together."""
        for shape, group in self.groups.items():
            gradient = torch.stack([p.grad for p in group if p.grad is not None])
            average = self.momenta[shape].lerp_(gradient, 1 - momentum)
            update = orthogonalise(gradient.lerp(average, momentum))
            self.apply(group, update * max(1.0, shape[0] / shape[1]) ** 0.5, scale * self.rate)

    def apply(self, group: list[nn.Parameter], update: Tensor, rate: float) -> None:
        """Shrink and move each matrix in place."""
        with torch.no_grad():
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - rate * self.decay).add_(change, alpha=-rate)


class Optimiser:
    """Both optimisers behind one `step`."""

    def __init__(self, network: nn.Module, matrix_rate: float, vector_rate: float, decay: float) -> None:
        named = list(network.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named if p.ndim != 2 or "embed" in name]
        self.muon = Muon(matrices, matrix_rate, decay)
        self.adam = torch.optim.AdamW(others, lr=vector_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.vector_rate = vector_rate

    def step(self, scale: float) -> None:
        """Update every parameter at `scale` times its base rate, and forget the gradients."""
        self.muon.step(scale)
        for group in self.adam.param_groups:
            group["lr"] = scale * self.vector_rate
        self.adam.step()
        self.adam.zero_grad()
        for parameter in (p for group in self.muon.groups.values() for p in group):
            parameter.grad = None
