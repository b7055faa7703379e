"""Resolve the job's optimizer to a class and its arguments, and check that it can be sharded.

name         "adamw", "lamb" or "module:attr"   -> find_class
arguments    that the class takes               -> resolve_optimizer
a trial      on slices of a parameter           -> _probe: only elementwise ones are taken
"""

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
from zrun_core.optim.chunked import GROUP, Bf16Adam, Bf16AdamW, Chunked, Lion, scratch_bytes
from zrun_core.optim.layerwise import Lamb, Lars, LayerWise, TrustRatios
from zrun_core.spine.sections.optim import OptimConfig
from zrun_core.spine.sections.optimizer_args import (
    ARGS_OF,
    BF16_KEY,
    NOT_SHARDED,
    WITH_BF16_MOMENTS,
    describe_argument_error,
    why_not_sharded,
)

OptimizerClass = Callable[..., torch.optim.Optimizer]
Options = Mapping[str, Any]  # of a parameter group, where they differ from the optimizer's own
MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
# States in a checkpoint that are no optimizer's: see its manifest.
RESERVED = frozenset({"value", "rank"})
_CPU = torch.device("cpu")
_OURS: dict[str, type[Chunked]] = {"lamb": Lamb, "lars": Lars, "lion": Lion}
_IN_BF16: list[tuple[OptimizerClass, type[Chunked]]] = [
    (torch.optim.Adam, Bf16Adam),
    (torch.optim.AdamW, Bf16AdamW),
    (Lamb, Lamb),
    (Lion, Lion),
]
ELEMENTWISE_ADVICE = "use an elementwise one, such as adamw, adam, sgd, adagrad or rmsprop"


def _torch_optimizers() -> dict[str, str]:
    """Return the names of torch's optimizers, by their lower-case names."""
    found = {}
    for name in dir(torch.optim):
        each = getattr(torch.optim, name)
        if inspect.isclass(each) and issubclass(each, torch.optim.Optimizer):
            found[name.lower()] = name
    del found["optimizer"]  # the base class
    return found


_BY_LOWER_NAME = _torch_optimizers()


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer that works on slices of parameters, and its keyword arguments.

    Attributes:
        name: as the user writes it.
        build: the class.
        kwargs: its arguments beside the parameters.
        moments: values that it keeps per parameter.
        scales_inside: its step takes `grad_scale` and `found_inf` tensors, so that no pass over the
            gradients and no host synchronisation is needed for unscaling, clipping and skipping.
        moment_dtype: of the values that it keeps.
        layer_wise: it is a `LayerWise`, whose update has two halves; elementwise if not.
    """

    name: str
    build: OptimizerClass
    kwargs: dict[str, Any]
    moments: int
    scales_inside: bool
    moment_dtype: torch.dtype = torch.float32
    layer_wise: bool = False

    @property
    def restarts_in_shards(self) -> bool:
        """True for classes of ours: see [Note: ranges and chunks] in `chunked.py`."""
        return _as_ours(self.build) is not None

    def scratch_bytes(self, device: str, reduce_dtype: torch.dtype) -> int:
        """Return the bytes that updates keep beside the moments.

        Args:
            device: type of device, "cpu" or "cuda".
        """
        num_bytes = 0
        casts = reduce_dtype != torch.float32 or not self.scales_inside
        if casts and not self.layer_wise:
            num_bytes = GROUP[device] * torch.float32.itemsize
        ours = _as_ours(self.build)
        if ours is not None:
            num_bytes += scratch_bytes(ours, self.moment_dtype, device)
        return num_bytes

    def make(self, params: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        """Return an optimizer over `params`."""
        return lightweight.build(self.build, params, self.kwargs)

    def trust(
        self, numbers: Sequence[int], groups: Sequence[Options], device: torch.device
    ) -> TrustRatios:
        """Return what computes the ratios of a layer-wise optimizer.

        A group that is said to be without weight decay is adapted only if the optimizer says so.

        Args:
            numbers: by tensor of the model, the number of its group.
        """
        rule = self.make([torch.nn.Parameter(torch.zeros(1, device=device))])
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
    """Find the class that `config` names, and the arguments that it takes.

    `betas` and `eps` are passed on where the job gives them: otherwise the class has defaults of
    its own.

    Args:
        load: resolves `module:attr`.
        device: where the optimizer will run, and is tried.

    Raises:
        JobError: no such optimizer, arguments that it does not take, or not elementwise.
    """
    build = find_class(config.name, load)
    if config.moments == "bf16":
        build = with_bf16_moments(config.name, build)
    accepted = arguments_of(build)
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    kwargs: dict[str, Any] = {"lr": config.lr}
    for key in ("betas", "eps", "weight_decay"):
        value = getattr(config, key)
        if value is None:
            continue
        if key in accepted:
            kwargs[key] = value
        elif key in config.model_fields_set and not takes_all:
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
    """Return the class that computes what `build` does and can keep its moments in bf16.

    Raises:
        JobError: there is none.
    """
    for usual, ours in _IN_BF16:
        if usual is build:
            return ours
    raise JobError(
        f"{name} keeps its state in fp32; bf16 is for {', '.join(WITH_BF16_MOMENTS)}", key="optim"
    )


def arguments_of(build: OptimizerClass) -> dict[str, inspect.Parameter]:
    """Return the keyword arguments that `build` takes from a user, by name."""
    try:
        parameters = list(inspect.signature(build).parameters.items())
    except (TypeError, ValueError):  # some that are written in C have no signature
        return {"options": inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)}
    accepted = dict(parameters[1:])  # the first one is the model's parameters
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
    """Check the optimizer `build(params, **kwargs)`, and describe it; fused where that can be.

    Args:
        device: where it will run, and is tried.

    Raises:
        JobError: it is neither elementwise nor one of ours, or refuses its arguments.
    """
    ours = _as_ours(build)
    if ours is not None:
        return _own_spec(name, ours, kwargs, moment_dtype)
    if kwargs.get("differentiable") and getattr(build, "__module__", "").startswith("torch.optim."):
        raise JobError(
            f"{name}: differentiable: updates of slices cannot be differentiated; leave it out",
            key="optim",
        )
    _try_arguments(name, build, kwargs, device)
    chooses_kernel = {"fused", "foreach", "capturable", "differentiable"} & kwargs.keys()
    if "fused" in arguments_of(build) and not chooses_kernel:
        # On CPU the default is a loop over tensors, 7 times slower. Some are not right when fused:
        # Adagrad is not on CUDA, and SGD with momentum wants a gradient for every parameter in the
        # first step. The trial finds out.
        with suppress(JobError):
            fused = {**kwargs, "fused": True}
            moments, scales_inside = _probe(name, build, fused, device)
            return OptimizerSpec(name, build, fused, moments, scales_inside)
    moments, scales_inside = _probe(name, build, kwargs, device)
    return OptimizerSpec(name, build, kwargs, moments, scales_inside)


def _as_ours(build: OptimizerClass) -> type[Chunked] | None:
    """Return `build` if it is a class of ours."""
    if isinstance(build, type) and issubclass(build, Chunked):
        return build
    return None


def _own_spec(
    name: str, build: type[Chunked], kwargs: dict[str, Any], moment_dtype: torch.dtype
) -> OptimizerSpec:
    kwargs = _with_checked_args(name, build, kwargs)
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


def _with_checked_args(name: str, build: type[Chunked], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return `kwargs` after the job's own checks of `optim.args` for this class, if it has any.

    Raises:
        JobError: an argument is not what the class takes.
    """
    for known, each in _OURS.items():
        if each is not build:
            continue
        section = ARGS_OF[known]
        own = {key: value for key, value in kwargs.items() if key in section.model_fields}
        try:
            return kwargs | section.model_validate(own).model_dump(exclude_unset=True)
        except ValidationError as error:
            problems = [describe_argument_error(name, section, detail) for detail in error.errors()]
            raise JobError(f"{name}: {'; '.join(problems)}", key="optim") from None
    return kwargs


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
        shown = [f"{key}={value!r}" for key, value in kwargs.items() if key != "moment_dtype"]
        advice = "; look at the types of these arguments" if isinstance(error, TypeError) else ""
        raise JobError(f"{name}({', '.join(shown)}): {error}{advice}", key="optim") from None


def find_class(name: str, load: Callable[[str], Any], *, moments: str = BF16_KEY) -> OptimizerClass:
    """Return the class called `name`: of torch.optim, ours, or a `module:attr`.

    Args:
        name: in any case; or `module:attr`.
        load: resolves `module:attr`.
        moments: how the user asks for moments in bf16.

    Raises:
        JobError: there is none.
    """
    if ":" in name:
        found = load(name)
        if not callable(found):
            raise JobError(f"{name} is not callable", key="optim.name")
        return found  # type: ignore[no-any-return]
    key = name.lower()
    problem = why_not_sharded(name, moments)
    if problem is not None:
        raise JobError(problem, key="optim.name")
    if key in _OURS:
        return _OURS[key]
    if key in _BY_LOWER_NAME:
        return getattr(torch.optim, _BY_LOWER_NAME[key])  # type: ignore[no-any-return]
    known_names = sorted({*_BY_LOWER_NAME, *_OURS} - {*NOT_SHARDED})
    near = difflib.get_close_matches(key, known_names, 3)
    hint = f"write one of {', '.join(known_names)}"
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    raise JobError(f"no optimizer {name!r}; {hint}", key="optim.name")


def _probe(
    name: str, build: OptimizerClass, kwargs: dict[str, Any], device: torch.device
) -> tuple[int, bool]:
    """Try an optimizer on slices of a parameter, as ranks will have them.

    Flat shards ignore the borders and shapes of parameters, so an optimizer that looks at a whole
    tensor (Muon, Adafactor, LBFGS) would silently compute something else. Three steps on a matrix
    [16, 32], and on its two halves [256] as two ranks have them, must agree. It must also bear that
    a parameter has no gradient in a step.

    Returns:
        The number of its moments, and whether it scales inside.

    Raises:
        JobError: it cannot be sharded.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(16, 32, generator=generator).to(device)
    grads = [torch.randn(16, 32, generator=generator).to(device) for _ in range(3)]
    visible = {**kwargs, "lr": 1e-2}  # a small rate would hide the difference

    def train(
        params: list[torch.Tensor], grads_of_steps: Sequence[Sequence[torch.Tensor | None]]
    ) -> torch.optim.Optimizer:
        optimizer = lightweight.build(build, params, visible)
        for grads_of_params in grads_of_steps:
            for param, grad in zip(params, grads_of_params, strict=True):
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
            f"{name} cannot update flat slices of parameters ({error}); {ELEMENTWISE_ADVICE}",
            key="optim",
        ) from None
    updated = torch.cat([first.detach(), second.detach()])
    if not torch.allclose(whole.detach().flatten(), updated, rtol=1e-6, atol=1e-7):
        raise JobError(
            f"{name} cannot be sharded, because it looks at whole tensors; {ELEMENTWISE_ADVICE}",
            key="optim",
        )
    state: dict[str, Any] = next(iter(optimizer.state.values()), {})
    taken = sorted(state.keys() & RESERVED)
    if taken:
        raise JobError(
            f"{name} keeps a state called {taken[0]!r}, which is something else in a checkpoint: "
            "rename it in the class",
            key="optim",
        )
    moments = 0
    for value in state.values():
        if isinstance(value, torch.Tensor) and value.shape == whole.shape:
            moments += 1
    return moments, bool(getattr(optimizer, "_step_supports_amp_scaling", False))
