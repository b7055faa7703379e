"""Optimizers that adapt the rate of each layer to norms of its parameter and update: LAMB and LARS.

A layer is a tensor of the model, wherever its elements lie, so an update has two halves: `propose`
leaves what is to be subtracted where the gradients were, and returns norms of the parts it saw;
once their squares are summed over all ranks, `apply` takes a trust ratio for each tensor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from zrun_core.optim.chunked import Chunk, Chunked, ParamRange


class RangeNorms(NamedTuple):
    """2-norms of parts of parameters and of their proposed updates: 0-d fp32 tensors."""

    parts: list[ParamRange]
    params: list[torch.Tensor]
    updates: list[torch.Tensor]


class LayerWise(Chunked):
    """Base of layer-wise optimizers."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Both halves of an update, of parameters that lie here whole and are all adapted."""
        decays: list[float] = []
        for group in self.param_groups:
            for param in group["params"]:
                self.place(param, len(decays), 0, max(1, param.numel()))
                decays.append(group["weight_decay"])
        trust = TrustRatios(
            self, decays, [True] * len(decays), self.param_groups[0]["params"][0].device
        )
        self.apply(trust.ratios(trust.squares([self.propose()], [0])))

    @torch.no_grad()
    def propose(self) -> RangeNorms:
        """Update the moments, and turn the gradients into proposed updates."""
        found = RangeNorms([], [], [])
        for group in self.param_groups:
            for chunk in self._chunks(group):
                self._propose(chunk, group)
                found.parts.extend(chunk.parts)
                found.params.extend(torch._foreach_norm(chunk.params))
                found.updates.extend(torch._foreach_norm(chunk.grads))
        return found

    @abstractmethod
    def apply(self, ratios: Sequence[Any]) -> None:
        """Subtract the proposed updates from the parameters that have one.

        Args:
            ratios: trust ratio by number of the tensor, a float or 0-d fp32 tensor each.
        """

    @abstractmethod
    def trust_ratios(
        self, params: torch.Tensor, updates: torch.Tensor, decays: torch.Tensor
    ) -> torch.Tensor:
        """Trust ratios [n] of layers with 2-norms `params` and `updates`, and with decays `decays`: all [n] float64."""

    @abstractmethod
    def _propose(self, chunk: Chunk, group: dict[str, Any]) -> None:
        """Update the moments of `chunk`, and overwrite its gradients with the update."""

    def _slices_with(
        self, group: dict[str, Any], *moments: str
    ) -> Iterator[tuple[ParamRange, tuple[torch.Tensor, ...]]]:
        """Parts of the group's parameters, with those of the proposed updates and of `moments` beside them."""
        for param in group["params"]:
            if param.grad is not None:
                parts = self._parts_of(param)
                sizes = [part.stop - part.start for part in parts]
                columns = [
                    t.split(sizes)
                    for t in (param, param.grad, *(self.state[param][name] for name in moments))
                ]
                yield from zip(parts, zip(*columns, strict=True), strict=True)


class Lamb(LayerWise):
    """LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", Algorithm 2).

    With m and v as in Adam, r = m / (sqrt(v) + eps) and u = r + weight_decay * x, a layer moves by
    lr * phi(|x|) / |u| * u.

    Args:
        bias_correction: divide m by 1 - beta1^t and v by 1 - beta2^t, as the algorithm does.
        norm_clamp: phi(z) = min(max(z, low), high); None is the identity.
        ratio_clamp: bounds of the whole ratio phi(|x|) / |u|, which other codes have instead; None: none.
        adapt_no_decay: whether layers that are exempt from decay have a trust ratio too.
    """

    moment_names = ("exp_avg", "exp_avg_sq")
    num_scratch = 1

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        norm_clamp: tuple[float, float] | None = None,
        ratio_clamp: tuple[float, float] | None = None,
        adapt_no_decay: bool = False,
        moment_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.bias_correction, self.norm_clamp, self.ratio_clamp = (
            bias_correction,
            norm_clamp,
            ratio_clamp,
        )
        self.adapt_no_decay = adapt_no_decay
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            moment_dtype,
        )

    def _propose(self, chunk: Chunk, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        exp_avgs, exp_avg_sqs = chunk.moments
        steps = chunk.steps
        if not self.bias_correction:  # after infinitely many steps there is nothing to correct
            steps = [torch.full_like(steps[0], float("inf"))] * len(steps)
        # Torch's fused Adam with a rate of 1, from zero, is -r and the new moments in one pass.
        room = self.scratch.like(chunk.params, 2)
        torch._foreach_zero_(room)
        torch._fused_adam_(
            room,
            chunk.grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            lr=1.0,
            beta1=beta1,
            beta2=beta2,
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )
        for minus_r, param, grad in zip(room, chunk.params, chunk.grads, strict=True):
            torch.sub(minus_r, param, alpha=group["weight_decay"], out=grad)  # -u

    @torch.no_grad()
    def apply(self, ratios: Sequence[Any]) -> None:
        for group in self.param_groups:
            for part, (param, minus_u) in self._slices_with(group):
                _add_times(
                    param, minus_u, ratios[part.number], group["lr"], self._unless_skipped(1.0, 0.0)
                )

    def trust_ratios(
        self, params: torch.Tensor, updates: torch.Tensor, decays: torch.Tensor
    ) -> torch.Tensor:
        if self.norm_clamp is not None:
            params = params.clamp(*self.norm_clamp)
        return _ratio(params, updates, self.ratio_clamp)


class Lars(LayerWise):
    """LARS (You et al. 2017, "Large Batch Training of Convolutional Networks", Algorithm 1).

    With g the gradient, a layer's local rate is trust_coefficient * |x| / (|g| + weight_decay * |x|), and
    v = momentum * v + lr * local * (g + weight_decay * x), x = x - v.

    Args:
        ratio_clamp: bounds of the local rate; None: none.
        adapt_no_decay: whether layers that are exempt from decay have a local rate too; theirs is 1 else.
    """

    moment_names = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float = 1e-3,
        momentum: float = 0.9,
        trust_coefficient: float = 1e-3,
        weight_decay: float = 0.0,
        ratio_clamp: tuple[float, float] | None = None,
        adapt_no_decay: bool = False,
    ) -> None:
        self.trust_coefficient, self.ratio_clamp, self.adapt_no_decay = (
            trust_coefficient,
            ratio_clamp,
            adapt_no_decay,
        )
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, torch.float32
        )

    def _propose(self, chunk: Chunk, group: dict[str, Any]) -> None:
        self._clean_grads(chunk)

    @torch.no_grad()
    def apply(self, ratios: Sequence[Any]) -> None:
        made = self._unless_skipped(1.0, 0.0)
        for group in self.param_groups:
            momentum = self._unless_skipped(group["momentum"], 1.0)
            for part, (param, grad, velocity) in self._slices_with(group, "momentum_buffer"):
                if group["weight_decay"]:
                    grad.add_(param, alpha=group["weight_decay"])
                velocity.mul_(momentum)
                _add_times(velocity, grad, ratios[part.number], group["lr"], made)
                param.sub_(velocity if self.found_inf is None else velocity * made)

    def trust_ratios(
        self, params: torch.Tensor, updates: torch.Tensor, decays: torch.Tensor
    ) -> torch.Tensor:
        return _ratio(self.trust_coefficient * params, updates + decays * params, self.ratio_clamp)


class TrustRatios:
    """From norms of parts to the trust ratios of all tensors of a model, which are its layers."""

    def __init__(
        self, rule: LayerWise, decays: Sequence[float], adapts: Sequence[bool], device: torch.device
    ) -> None:
        """`decays` and `adapts` by number of the tensor."""
        self._rule, self._told, self._device = rule, list(decays), device
        self._decays = torch.tensor(decays, dtype=torch.float64, device=device)
        self._adapts = torch.tensor(adapts, dtype=torch.bool, device=device)
        self._copied: tuple[Any, torch.Tensor] | None = None

    def set_decays(self, decays: Sequence[float]) -> None:
        """Replace the weight decay of each parameter, by its number; copied to the device only where one changes."""
        if decays != self._told:
            self._told = list(decays)
            self._decays = torch.tensor(decays, dtype=torch.float64, device=self._device)

    def squares(self, found: Sequence[RangeNorms], shards: Sequence[int]) -> torch.Tensor:
        """Squared norms [2 * n] float64 of what lies in `shards`: those of the parameters, then those of the updates.

        Parts are added in order, then shards: by one rank that has all of them as by ranks that have one each.
        """
        table = torch.zeros(
            len(shards), 2, len(self._decays), dtype=torch.float64, device=self._decays.device
        )
        row_of = {shard: row for row, shard in enumerate(shards)}
        norms: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        places: list[tuple[int, int]] = []
        lengths: list[int] = []
        for each in found:
            counted = [k for k, part in enumerate(each.parts) if part.shard in row_of]
            norms[0].extend(each.params[k] for k in counted)
            norms[1].extend(each.updates[k] for k in counted)
            keys = ((row_of[each.parts[k].shard], each.parts[k].number) for k in counted)
            for key, same in groupby(keys):
                places.append(key)
                lengths.append(sum(1 for _ in same))
        if places:
            stacked = (
                torch.stack([torch.stack(of_one_kind) for of_one_kind in norms], 1)
                .double()
                .square()
            )
            rows, numbers, sizes = self._on_device(tuple(places), tuple(lengths))
            sums = torch.segment_reduce(
                stacked, "sum", lengths=sizes, unsafe=True, initial=0.0
            )  # no look at `sizes`
            # A tensor whose parts lie in several units is there more than once.
            table.mT.index_put_((rows, numbers), sums, accumulate=True)
        return table.sum(0).flatten()

    def _on_device(
        self, places: tuple[tuple[int, int], ...], lengths: tuple[int, ...]
    ) -> torch.Tensor:
        """int64 [3, n]: rows, numbers and lengths. Copied once: they change only with what got a gradient."""
        if self._copied is None or self._copied[0] != (places, lengths):
            together = torch.tensor(
                [*zip(*places, strict=True), lengths], device=self._decays.device
            )
            self._copied = (places, lengths), together
        return self._copied[1]

    def ratios(self, squares: torch.Tensor) -> Sequence[Any]:
        """Trust ratios by number of the tensor, from the sum over all ranks of `squares`."""
        params, updates = squares.sqrt().view(2, -1)
        ratios = self._rule.trust_ratios(params, updates, self._decays).where(self._adapts, 1.0)
        return ratios.tolist() if ratios.device.type == "cpu" else ratios.float().unbind()


def _ratio(
    over: torch.Tensor, under: torch.Tensor, clamp: tuple[float, float] | None
) -> torch.Tensor:
    """over / under, and 1 where a norm is 0: a layer at zero could never leave it."""
    ratio = torch.where((over > 0) & (under > 0), over / under, 1.0)
    return ratio if clamp is None else ratio.clamp(*clamp)


def _add_times(tensor: torch.Tensor, other: torch.Tensor, ratio: Any, lr: float, made: Any) -> None:
    """tensor += lr * ratio * other, of which `ratio` and `made` (1 or 0) may lie on a device."""
    if isinstance(ratio, float):
        tensor.add_(other, alpha=lr * ratio)
    else:
        tensor.addcmul_(other, ratio * made, value=lr)
