"""The job's optimizer as a plain loop would have it: torch's own classes, and three from papers.

Each of ours updates one whole parameter after the other, as the algorithm in its paper reads.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from zrun_core.spine.sections.optim import OptimConfig
from zrun_core.spine.sections.section import Ref
from zrun_core.user_code import user

_KERNELS = ("fused", "foreach", "capturable")  # the same update, in another order


class _Plain(torch.optim.Optimizer):
    """An optimizer whose update is a function of one parameter, its gradient and its state."""

    def __init__(self, params: Iterable[Any], **defaults: Any) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param], group)

    def update(
        self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Update a parameter in place."""
        raise NotImplementedError  # each class below has its own


def _ratio(
    above: torch.Tensor, below: torch.Tensor, group: dict[str, Any], clamp: Any
) -> torch.Tensor:
    """Return the trust ratio of a parameter; 1 where its group has none, or a norm is zero."""
    if group["is_exempt"] and not group["adapt_no_decay"]:
        return torch.ones(())
    if above == 0 or below == 0:
        return torch.ones(())
    ratio = above / below
    return ratio if clamp is None else ratio.clamp(*clamp)


class PlainLamb(_Plain):
    """LAMB (You et al. 2020, Algorithm 2)."""

    def update(
        self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        beta1, beta2 = group["betas"]
        t = state["t"] = state.get("t", 0) + 1
        m = state.setdefault("m", torch.zeros_like(x))
        v = state.setdefault("v", torch.zeros_like(x))
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).add_(g * g, alpha=1 - beta2)
        m_hat, v_hat = m, v
        if group["bias_correction"]:
            m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        u = m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * x
        size = x.norm()
        if group["norm_clamp"] is not None:
            size = size.clamp(*group["norm_clamp"])
        x.sub_(u * _ratio(size, u.norm(), group, group["ratio_clamp"]), alpha=group["lr"])


class PlainLars(_Plain):
    """LARS (You et al. 2017, Algorithm 1)."""

    def update(
        self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        decay = group["weight_decay"]
        below = g.norm() + decay * x.norm()
        above = group["trust_coefficient"] * x.norm()
        local = _ratio(above, below, group, group["ratio_clamp"])
        v = state.setdefault("v", torch.zeros_like(x))
        v.mul_(group["momentum"]).add_(group["lr"] * local * (g + decay * x))
        x.sub_(v)


class PlainLion(_Plain):
    """Lion (Chen et al. 2023, Algorithm 2)."""

    def update(
        self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        beta1, beta2 = group["betas"]
        m = state.setdefault("m", torch.zeros_like(x))
        sign = (beta1 * m + (1 - beta1) * g).sign()
        x.mul_(1 - group["lr"] * group["weight_decay"]).sub_(sign, alpha=group["lr"])
        m.mul_(beta2).add_(g, alpha=1 - beta2)


_OURS: dict[str, tuple[type[_Plain], dict[str, Any]]] = {
    "lamb": (
        PlainLamb,
        {
            "betas": (0.9, 0.999),
            "eps": 1e-6,
            "bias_correction": True,
            "norm_clamp": None,
            "ratio_clamp": None,
            "adapt_no_decay": False,
        },
    ),
    "lars": (
        PlainLars,
        {
            "momentum": 0.9,
            "trust_coefficient": 1e-3,
            "ratio_clamp": None,
            "adapt_no_decay": False,
        },
    ),
    "lion": (PlainLion, {"betas": (0.9, 0.99)}),
}


def plain_optimizer(
    config: OptimConfig, params: Mapping[str, torch.Tensor], job_dir: Path
) -> torch.optim.Optimizer:
    """Return the job's optimizer over whole parameters.

    Args:
        params: fp32 values, by name.
        job_dir: folder of the job file, for an optimizer of the user's.
    """
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    for key in ("betas", "eps"):
        if getattr(config, key) is not None:
            options[key] = getattr(config, key)
    options |= {key: value for key, value in config.args.items() if key not in _KERNELS}
    build, defaults = _OURS.get(config.name.lower(), (None, {}))
    if build is None:
        build = _class_of(config.name, job_dir)
        signature = inspect.signature(build).parameters
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values())
        if not takes_all:
            options = {key: value for key, value in options.items() if key in signature}
    groups = []
    for name, param in params.items():
        is_exempt = any(re.search(pattern, name) for pattern in config.no_decay)
        group: dict[str, Any] = {"params": [param], "is_exempt": is_exempt}
        if is_exempt:
            group["weight_decay"] = 0.0
        groups.append(group)
    return build(groups, **defaults | options)


def _class_of(name: str, job_dir: Path) -> Any:
    if ":" in name:
        return user.load(Ref(call=name), job_dir)
    by_lower = {each.lower(): each for each in dir(torch.optim)}
    return getattr(torch.optim, by_lower[name.lower()])
