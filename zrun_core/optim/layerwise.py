"""Optimizers that adapt the rate of each layer to norms of its parameter and update: LAMB and LARS.

A layer is a tensor of the model, wherever its elements lie, so an update has two halves:

    propose    each rank, of the ranges that it has: update the moments, and leave the proposed
               update where the gradient was; return the norms of both
                   |
                   |  TrustRatios.squares: sums of their squares, by tensor
                   |  all-reduce over the ranks
                   |  TrustRatios.ratios: a ratio for each tensor
                   v
    apply      each rank: param += lr * ratio * proposed update

Example, LAMB with a tensor of two elements, one on each of two ranks: |x| = (3, 4), |u| = (1, 0).
The ranks send squares (9, 1) and (16, 0), the sum is (25, 1), and the ratio 5 / 1 on both.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from zrun_core.distributed.named_vector import sent_to
from zrun_core.optim.chunked import Chunk, Chunked, ParamRange, split_by_range


class RangeNorms(NamedTuple):
    """2-norms of ranges of parameters and of their proposed updates: 0-d fp32 tensors."""

    ranges: list[ParamRange]
    params: list[torch.Tensor]
    updates: list[torch.Tensor]

    def to(self, device: torch.device) -> RangeNorms:
        """Return them on `device`, where norms of all units are summed."""
        norms = [*self.params, *self.updates]
        if not norms or norms[0].device.type == device.type:
            return self
        sent = sent_to(device, torch.stack(norms)).unbind()
        count = len(self.params)
        return RangeNorms(self.ranges, list(sent[:count]), list(sent[count:]))


class LayerWise(Chunked):
    """Base of layer-wise optimizers."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make both halves of an update, of whole parameters that are all adapted."""
        decays: list[float] = []
        for group in self.param_groups:
            for param in group["params"]:
                self.place(param, len(decays), 0, max(1, param.numel()))
                decays.append(group["weight_decay"])
        device = self.param_groups[0]["params"][0].device
        trust = TrustRatios(self, decays, [True] * len(decays), device)
        squares = trust.squares([self.propose()], [0])
        self.apply(trust.ratios(squares))

    @torch.no_grad()
    def propose(self) -> RangeNorms:
        """Update the moments, and turn the gradients into proposed updates."""
        found = RangeNorms([], [], [])
        for group in self.param_groups:
            for chunk in self._chunks(group):
                self._propose(chunk, group)
                found.ranges.extend(chunk.ranges)
                found.params.extend(torch._foreach_norm(chunk.params))
                found.updates.extend(torch._foreach_norm(chunk.grads))
        return found

    @abstractmethod
    def apply(self, ratios: Sequence[torch.Tensor]) -> None:
        """Subtract the proposed updates from the parameters that have one.

        Args:
            ratios: trust ratio by number of the tensor, 0-d fp32 each, beside the parameters.
        """

    @abstractmethod
    def trust_ratios(
        self, params: torch.Tensor, updates: torch.Tensor, decays: torch.Tensor
    ) -> torch.Tensor:
        """Return the trust ratios [n] float64 of n layers.

        Args:
            params: [n] float64, 2-norms of the layers.
            updates: [n] float64, 2-norms of their proposed updates.
            decays: [n] float64, their weight decays.
        """

    @abstractmethod
    def _propose(self, chunk: Chunk, group: dict[str, Any]) -> None:
        """Update the moments of `chunk`, and overwrite its gradients with the proposed update."""

    def _slices_with(
        self, group: dict[str, Any], *moments: str
    ) -> Iterator[tuple[ParamRange, tuple[torch.Tensor, ...]]]:
        """Yield for each range of the group's parameters (parameter, proposed update, *moments)."""
        for param in group["params"]:
            if param.grad is None:
                continue
            ranges = self._ranges_of(param)
            states = [self.state[param][name] for name in moments]
            slices = split_by_range([param, param.grad, *states], ranges)
            yield from zip(ranges, slices, strict=True)


class Lamb(LayerWise):
    """LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", Algorithm 2).

    With m and v as in Adam, r = m / (sqrt(v) + eps) and u = r + weight_decay * x, a layer moves by
    lr * phi(|x|) / |u| * u.
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
        """
        Args:
            params: 1-D fp32 each, or groups of them.
            lr: learning rate.
            betas: of the two moments.
            eps: added to sqrt(v).
            weight_decay: as above.
            bias_correction: divide m by 1 - beta1^t and v by 1 - beta2^t, as the algorithm does.
            norm_clamp: phi(z) = min(max(z, low), high); None is the identity.
            ratio_clamp: bounds of the whole ratio phi(|x|) / |u|, which other codes have instead;
                None: none.
            adapt_no_decay: layers that are exempt from decay have a trust ratio too.
            moment_dtype: fp32 or bf16.
        """
        self.bias_correction = bias_correction
        self.norm_clamp = norm_clamp
        self.ratio_clamp = ratio_clamp
        self.adapt_no_decay = adapt_no_decay
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, moment_dtype)

    def _propose(self, chunk: Chunk, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        exp_avgs, exp_avg_sqs = chunk.moments
        steps = chunk.steps
        if not self.bias_correction:  # after infinitely many steps there is nothing to correct
            steps = [torch.full_like(steps[0], float("inf"))] * len(steps)
        # Torch's fused Adam with a rate of 1, from zero, is -r and the new moments in one pass.
        minus_rs = self.scratch.like(chunk.params, 2)  # 0 and 1 may hold moments
        torch._foreach_zero_(minus_rs)
        torch._fused_adam_(
            minus_rs,
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
        for minus_r, param, grad in zip(minus_rs, chunk.params, chunk.grads, strict=True):
            torch.sub(minus_r, param, alpha=group["weight_decay"], out=grad)  # -u

    @torch.no_grad()
    def apply(self, ratios: Sequence[torch.Tensor]) -> None:
        is_made = self._unless_skipped(1.0, 0.0)
        for group in self.param_groups:
            for each, (param, minus_u) in self._slices_with(group):
                _add_times(param, minus_u, ratios[each.number], group["lr"], is_made)

    def trust_ratios(
        self, params: torch.Tensor, updates: torch.Tensor, decays: torch.Tensor
    ) -> torch.Tensor:
        if self.norm_clamp is not None:
            params = params.clamp(*self.norm_clamp)
        return _ratio(params, updates, self.ratio_clamp)


class Lars(LayerWise):
    """LARS (You et al. 2017, "Large Batch Training of Convolutional Networks", Algorithm 1).

    With g the gradient, a layer's local rate is trust_coefficient * |x| / (|g| + weight_decay *
    |x|), and v = momentum * v + lr * local * (g + weight_decay * x), x = x - v.
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
        """
        Args:
            params: 1-D fp32 each, or groups of them.
            lr: learning rate.
            momentum: as above.
            trust_coefficient: as above.
            weight_decay: as above.
            ratio_clamp: bounds of the local rate; None: none.
            adapt_no_decay: layers that are exempt from decay have a local rate too; else it is 1.
        """
        self.trust_coefficient = trust_coefficient
        self.ratio_clamp = ratio_clamp
        self.adapt_no_decay = adapt_no_decay
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, torch.float32)

    def _propose(self, chunk: Chunk, group: dict[str, Any]) -> None:
        self._clean_grads(chunk)  # the proposed update is the gradient; `apply` adds the decay

    @torch.no_grad()
    def apply(self, ratios: Sequence[torch.Tensor]) -> None:
        is_made = self._unless_skipped(1.0, 0.0)
        for group in self.param_groups:
            momentum = self._unless_skipped(group["momentum"], 1.0)
            for each, (param, grad, velocity) in self._slices_with(group, "momentum_buffer"):
                if group["weight_decay"]:
                    grad.add_(param, alpha=group["weight_decay"])
                velocity.mul_(momentum)
                _add_times(velocity, grad, ratios[each.number], group["lr"], is_made)
                param.sub_(velocity if self.found_inf is None else velocity * is_made)

    def trust_ratios(
        self, params: torch.Tensor, updates: torch.Tensor, decays: torch.Tensor
    ) -> torch.Tensor:
        return _ratio(self.trust_coefficient * params, updates + decays * params, self.ratio_clamp)


class TrustRatios:
    """From norms of ranges to the trust ratios of all tensors of a model."""

    def __init__(
        self, rule: LayerWise, decays: Sequence[float], adapts: Sequence[bool], device: torch.device
    ) -> None:
        """
        Args:
            decays: by number of the tensor, its weight decay.
            adapts: by number of the tensor; False is a ratio of 1.
        """
        self._rule = rule
        self._given_decays = list(decays)
        self._device = device
        self._decays = torch.tensor(decays, dtype=torch.float64, device=device)
        self._adapts = torch.tensor(adapts, dtype=torch.bool, device=device)
        self._copied: tuple[Any, torch.Tensor] | None = None  # what `_on_device` got and returned

    def set_decays(self, decays: Sequence[float]) -> None:
        """Replace the weight decay of each tensor; copied to the device only where one changes."""
        if decays != self._given_decays:
            self._given_decays = list(decays)
            self._decays = torch.tensor(decays, dtype=torch.float64, device=self._device)

    def squares(self, found: Sequence[RangeNorms], shards: Sequence[int]) -> torch.Tensor:
        """Return the squared norms of what lies in `shards`, by tensor.

        Ranges are added in order, then shards: so a rank that has all shards gets the same bits as
        ranks that have one each, whose results are added in the same order.

            table [shard, param | update, tensor]  --sum over shards-->  [param | update, tensor]

        Args:
            found: norms of each unit.
            shards: numbers of those that this rank counts.

        Returns:
            [2 * tensors] float64: squares of the parameters, then squares of the updates.
        """
        num_tensors = len(self._decays)
        table = torch.zeros(
            len(shards), 2, num_tensors, dtype=torch.float64, device=self._decays.device
        )
        row_of = {shard: row for row, shard in enumerate(shards)}
        param_norms: list[torch.Tensor] = []
        update_norms: list[torch.Tensor] = []
        places: list[tuple[int, int]] = []  # (row, tensor) of each run of ranges
        lengths: list[int] = []  # ranges of each run
        for each in found:
            counted = [k for k, one in enumerate(each.ranges) if one.shard in row_of]
            param_norms.extend(each.params[k] for k in counted)
            update_norms.extend(each.updates[k] for k in counted)
            keys = ((row_of[each.ranges[k].shard], each.ranges[k].number) for k in counted)
            for key, run in groupby(keys):
                places.append(key)
                lengths.append(len(list(run)))
        if places:
            norms = torch.stack([torch.stack(param_norms), torch.stack(update_norms)], 1)
            squares = norms.double().square()  # [ranges, 2]
            rows, numbers, sizes = self._on_device(tuple(places), tuple(lengths))
            # `unsafe`: without a check of `sizes`, for which the host would wait.
            sums = torch.segment_reduce(squares, "sum", lengths=sizes, unsafe=True, initial=0.0)
            # A tensor with ranges in several units has several runs: they accumulate.
            table.mT.index_put_((rows, numbers), sums, accumulate=True)
        return table.sum(0).flatten()

    def _on_device(
        self, places: tuple[tuple[int, int], ...], lengths: tuple[int, ...]
    ) -> torch.Tensor:
        """Return [3, n] int64: rows, numbers and lengths.

        Copied once: they change only with the parameters that got a gradient.
        """
        if self._copied is None or self._copied[0] != (places, lengths):
            columns = [*zip(*places, strict=True), lengths]
            self._copied = (places, lengths), torch.tensor(columns, device=self._decays.device)
        return self._copied[1]

    def ratios(self, squares: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the trust ratios by number of the tensor, 0-d fp32 each, where norms are summed.

        Args:
            squares: [2 * tensors] float64, the sum of `squares` over all ranks.
        """
        params, updates = squares.sqrt().view(2, -1)
        ratios = self._rule.trust_ratios(params, updates, self._decays).where(self._adapts, 1.0)
        return ratios.float().unbind()


def _ratio(
    over: torch.Tensor, under: torch.Tensor, clamp: tuple[float, float] | None
) -> torch.Tensor:
    """Return over / under [n], and 1 where a norm is 0: a layer at zero could never leave it."""
    ratio = torch.where((over > 0) & (under > 0), over / under, 1.0)
    return ratio if clamp is None else ratio.clamp(*clamp)


def _add_times(
    tensor: torch.Tensor, other: torch.Tensor, ratio: torch.Tensor, lr: float, is_made: Any
) -> None:
    """Add lr * ratio * other to `tensor`, rounded alike on the host and on a device.

    `tensor` and `other` have one shape; `ratio` is 0-d, beside them; `is_made` is 1 or 0, perhaps
    0-d on a device.
    """
    tensor.addcmul_(other, ratio * is_made, value=lr)
