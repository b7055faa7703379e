"""From the job's words to an optimizer class, by name or `module:attr`: only what works on slices of parameters."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError

from zrun_core.errors import JobError
from zrun_core.optim import lightweight
from zrun_core.optim.chunked import Bf16Adam, Bf16AdamW, Chunked, Lion, scratch_bytes
from zrun_core.optim.layerwise import Lamb, Lars, LayerWise, TrustRatios
from zrun_core.spine.config import OptimConfig
from zrun_core.spine.optimizer_args import (
    ARGS_OF,
    NOT_SHARDED,
    WITH_BF16_MOMENTS,
    describe_argument_error,
)

OptimizerClass = Callable[..., torch.optim.Optimizer]
Options = Mapping[str, Any]  # of a parameter group, where they differ from the optimizer's own
MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
RESERVED = frozenset(
    {"value", "rank"}
)  # states in a checkpoint that are no optimizer's: see its manifest
_CPU = torch.device("cpu")
_BY_LOWER_NAME = {
    name.lower(): name
    for name in dir(torch.optim)
    if inspect.isclass(getattr(torch.optim, name))
    and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
}
_OURS: dict[str, type[Chunked]] = {"lamb": Lamb, "lars": Lars, "lion": Lion}
_IN_BF16: list[tuple[OptimizerClass, type[Chunked]]] = [
    (torch.optim.Adam, Bf16Adam),
    (torch.optim.AdamW, Bf16AdamW),
    (Lamb, Lamb),
    (Lion, Lion),
]


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer that works on slices of parameters, and its keyword arguments.

    Attributes:
        moments: values that it keeps per parameter.
        scales_inside: whether its step takes `grad_scale` and `found_inf` tensors, so that no pass over the gradients
            and no host synchronisation is needed for unscaling, clipping and skipping.
        layer_wise: whether it is a `LayerWise`, whose update has two halves; elementwise if not.
    """

    name: str
    build: OptimizerClass
    kwargs: dict[str, Any]
    moments: int
    scales_inside: bool
    moment_dtype: torch.dtype = torch.float32
    layer_wise: bool = False

    def scratch_bytes(self, device: str) -> int:
        """Bytes that updates on devices of this type, "cpu" or "cuda", keep beside the moments."""
        ours = _as_ours(self.build)
        return scratch_bytes(ours, self.moment_dtype, device) if ours is not None else 0

    def make(
        self, params: Sequence[torch.Tensor], weight_decay: float | None
    ) -> torch.optim.Optimizer:
        """An optimizer over `params`; `weight_decay` replaces the configured one if given."""
        kwargs = dict(self.kwargs)
        if weight_decay is not None and "weight_decay" in kwargs:
            kwargs["weight_decay"] = weight_decay
        return lightweight.build(self.build, params, kwargs)

    def trust(
        self, numbers: Sequence[int], groups: Sequence[Options], device: torch.device
    ) -> TrustRatios:
        """What a layer-wise optimizer needs to know of all parameters, given the group of each, and the groups.

        A group that is said to be without weight decay is adapted only if the optimizer says so.
        """
        rule = self.make([torch.nn.Parameter(torch.zeros(1, device=device))], None)
        assert isinstance(rule, Lamb | Lars)
        decays = [group.get("weight_decay", rule.defaults["weight_decay"]) for group in groups]
        adapts = [group.get("weight_decay") != 0.0 or rule.adapt_no_decay for group in groups]
        return TrustRatios(
            rule,
            [decays[number] for number in numbers],
            [adapts[number] for number in numbers],
            device,
        )


def resolve_optimizer(
    config: OptimConfig, load: Callable[[str], Any], device: torch.device = _CPU
) -> OptimizerSpec:
    """Find the class that `config` names and the arguments that it takes. `load` resolves `module:attr`.

    `betas` and `eps` are passed on where the job gives them: otherwise the class has defaults of its own.

    Raises:
        JobError: no such optimizer, arguments that it does not take, or one that is not elementwise.
    """
    build = find_class(config.name, load)
    if config.moments == "bf16":
        build = with_bf16_moments(config.name, build)
    accepted = arguments_of(build)
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    kwargs: dict[str, Any] = {"lr": config.lr}
    for key in ("betas", "eps", "weight_decay"):
        value = getattr(config, key)
        if key in accepted and value is not None:
            kwargs[key] = value
        elif (
            key in config.model_fields_set
            and value is not None
            and key not in accepted
            and not takes_all
        ):
            raise JobError(
                f"optim.{key}: {config.name} has no such argument; it takes {', '.join(accepted)}"
            )
    for key in config.args:
        if key not in accepted and not takes_all:
            near = difflib.get_close_matches(key, accepted, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise JobError(f"optim.args.{key}: {config.name} has no such argument{hint}")
    kwargs |= config.args
    return spec_of(config.name, build, kwargs, device, MOMENTS[config.moments])


def with_bf16_moments(name: str, build: OptimizerClass) -> OptimizerClass:
    """The class that computes what `build` does, called `name`, and can keep its moments in bf16.

    Raises:
        JobError: there is none.
    """
    found = next((ours for plain, ours in _IN_BF16 if plain is build), None)
    if found is None:
        raise JobError(
            f"optim: {name} keeps its state in fp32; bf16 is for {', '.join(WITH_BF16_MOMENTS)}"
        )
    return found


def arguments_of(build: OptimizerClass) -> dict[str, inspect.Parameter]:
    """Keyword arguments that `build` takes from a user, by name."""
    try:
        accepted = dict(
            list(inspect.signature(build).parameters.items())[1:]
        )  # without the parameters
    except (TypeError, ValueError):  # some that are written in C have none
        return {"options": inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)}
    if _as_ours(build) is not None:
        accepted.pop("moment_dtype", None)
    return accepted


def spec_of(
    name: str,
    build: OptimizerClass,
    kwargs: dict[str, Any],
    device: torch.device,
    moment_dtype: torch.dtype = torch.float32,
) -> OptimizerSpec:
    """The optimizer `build(params, **kwargs)`, called `name`, fused where that can be.

    Raises:
        JobError: it is neither elementwise nor one of ours, or refuses its arguments.
    """
    if (ours := _as_ours(build)) is not None:
        return _with(name, ours, kwargs, moment_dtype)
    if kwargs.get("differentiable") and getattr(build, "__module__", "").startswith("torch.optim."):
        raise JobError(
            f"optim: {name}: differentiable: updates of slices cannot be differentiated; leave it out"
        )
    _try_arguments(name, build, kwargs, device)
    if (
        "fused" in arguments_of(build)
        and not {"fused", "foreach", "capturable", "differentiable"} & kwargs.keys()
    ):
        # On CPU the default is a loop over tensors, 7 times slower. Some are not right when fused: Adagrad is not on
        # CUDA, and SGD with momentum wants a gradient for every parameter in the first step.
        with suppress(JobError):
            fused = {**kwargs, "fused": True}
            return OptimizerSpec(name, build, fused, *_probe(name, build, fused, device))
    return OptimizerSpec(name, build, kwargs, *_probe(name, build, kwargs, device))


def _as_ours(build: OptimizerClass) -> type[Chunked] | None:
    return build if isinstance(build, type) and issubclass(build, Chunked) else None


def _with(
    name: str, build: type[Chunked], kwargs: dict[str, Any], moment_dtype: torch.dtype
) -> OptimizerSpec:
    section = next((ARGS_OF[known] for known, each in _OURS.items() if each is build), None)
    if section is not None:
        own = {key: value for key, value in kwargs.items() if key in section.model_fields}
        try:
            kwargs = kwargs | section.model_validate(own).model_dump(exclude_unset=True)
        except ValidationError as error:
            problems = "; ".join(
                describe_argument_error(name, section, detail) for detail in error.errors()
            )
            raise JobError(f"optim: {name}: {problems}") from None
    if "moment_dtype" in inspect.signature(build).parameters:
        kwargs = {**kwargs, "moment_dtype": moment_dtype}
    _try_arguments(name, build, kwargs, _CPU)
    return OptimizerSpec(
        name,
        build,
        kwargs,
        len(build.moment_names),
        scales_inside=True,
        moment_dtype=moment_dtype,
        layer_wise=issubclass(build, LayerWise),
    )


def _try_arguments(
    name: str, build: OptimizerClass, kwargs: dict[str, Any], device: torch.device
) -> None:
    """Let the class look at its arguments.

    Raises:
        JobError: it refuses them.
    """
    try:
        lightweight.build(build, [torch.nn.Parameter(torch.zeros(2, 2, device=device))], kwargs)
    except Exception as error:
        given = ", ".join(
            f"{key}={value!r}" for key, value in kwargs.items() if key != "moment_dtype"
        )
        advice = "; look at the types of these arguments" if isinstance(error, TypeError) else ""
        raise JobError(f"optim: {name}({given}): {error}{advice}") from None


def find_class(name: str, load: Callable[[str], Any]) -> OptimizerClass:
    """The class called `name`, of torch.optim or ours unless it is `module:attr`, which `load` resolves.

    Raises:
        JobError: there is none.
    """
    if ":" in name:
        found = load(name)
        if not callable(found):
            raise JobError(f"optim.name: {name} is not callable")
        return found  # type: ignore[no-any-return]
    if (reason := NOT_SHARDED.get(name.lower())) is not None:
        raise JobError(f"optim.name: {name} cannot update slices of parameters: {reason}")
    if name.lower() in _OURS:
        return _OURS[name.lower()]
    if (known := _BY_LOWER_NAME.get(name.lower())) is None or known == "Optimizer":
        known_names = sorted({*_BY_LOWER_NAME, *_OURS} - {"optimizer", *NOT_SHARDED})
        near = difflib.get_close_matches(name.lower(), known_names, 3)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"write one of {', '.join(known_names)}"
        )
        raise JobError(f"optim.name: no optimizer {name!r}; {hint}")
    return getattr(torch.optim, known)  # type: ignore[no-any-return]


def _probe(
    name: str, build: OptimizerClass, kwargs: dict[str, Any], device: torch.device
) -> tuple[int, bool]:
    """(moments, scales_inside) of an optimizer that updates slices exactly as it updates the whole.

    Flat shards ignore the borders and shapes of parameters, so an optimizer that looks at a whole tensor (Muon,
    Adafactor, LBFGS) would silently compute something else. Three steps on a matrix, and on its two halves as two ranks
    have them, tell. It must also bear that a parameter has no gradient in a step.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(16, 32, generator=generator).to(device)
    grads = [torch.randn(16, 32, generator=generator).to(device) for _ in range(3)]
    visible = {**kwargs, "lr": 1e-2}  # a small rate would hide the difference

    def train(
        params: list[torch.Tensor], slices: Sequence[Sequence[torch.Tensor | None]]
    ) -> torch.optim.Optimizer:
        optimizer = lightweight.build(build, params, visible)
        for step in slices:
            for param, grad in zip(params, step, strict=True):
                param.grad = None if grad is None else grad.clone()
            lightweight.step(optimizer)
        return optimizer

    def halves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(tensor.detach().flatten().split(tensor.numel() // 2))

    whole = torch.nn.Parameter(start.clone())
    first, second, beside, late = (
        torch.nn.Parameter(half.clone()) for half in halves_of(start) * 2
    )
    slices = [halves_of(grad) for grad in grads]
    try:
        optimizer = train([whole], [[grad] for grad in grads])
        train([first], [[grad] for grad, _ in slices])
        train([second], [[grad] for _, grad in slices])
        train([beside, late], [[slices[0][0], None], *slices])
    except Exception as error:
        raise JobError(
            f"optim: {name} cannot update flat slices of parameters ({error}); {_ADVICE}"
        ) from None
    updated = torch.cat([first.detach(), second.detach()])
    if not torch.allclose(whole.detach().flatten(), updated, rtol=1e-6, atol=1e-7):
        raise JobError(
            f"optim: {name} cannot be sharded, because it looks at whole tensors; {_ADVICE}"
        )
    state: dict[str, Any] = next(iter(optimizer.state.values()), {})
    if taken := sorted(state.keys() & RESERVED):
        raise JobError(
            f"optim: {name} keeps a state called {taken[0]!r}, which is something else in a checkpoint: rename it in "
            "the class"
        )
    moments = sum(
        isinstance(value, torch.Tensor) and value.shape == whole.shape for value in state.values()
    )
    return moments, bool(getattr(optimizer, "_step_supports_amp_scaling", False))


_ADVICE = "use an elementwise one, such as adamw, adam, sgd, adagrad or rmsprop"
