"""Models in a user's own loop: shard one, run it, evaluate it, see it whole."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from zrun_core.activations.offloaded_inputs import OffloadedInputs
from zrun_core.distributed import rng
from zrun_core.distributed.mesh import Mesh
from zrun_core.errors import JobError, UserCodeError
from zrun_core.library import arguments, foreign
from zrun_core.library.run import Run, current
from zrun_core.memory.buffers import placement_of
from zrun_core.spine.parallel_dims import resolve_shard_size
from zrun_core.spine.sections.activations import ActivationsConfig
from zrun_core.spine.sections.offload import OffloadConfig
from zrun_core.spine.sections.precision import PrecisionConfig
from zrun_core.spine.sections.zero import ZeroConfig
from zrun_core.train import parallelize
from zrun_core.user_code.build import Built, build_once_per_host, check
from zrun_core.user_code.meta_init import build_on_meta
from zrun_core.user_code.user import user_code
from zrun_core.zero.passes.autograd_driver import ImplicitPasses
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.wrap.tiling import read_tiles

Model = TypeVar("Model", bound=nn.Module)

_HANDLE = "_zrun"  # attribute of a sharded module


class ModelHandle:
    """The parts of a sharded module; an attribute of the module, so that it lives as long."""

    def __init__(self, run: Run, sharded: ShardedModel, loop: ImplicitPasses) -> None:
        self.run = run
        self.sharded = sharded
        self.loop = loop
        self.optimizer: torch.optim.Optimizer | None = None

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the module is a plain module."""

    @classmethod
    def of(cls, model: nn.Module, what: str) -> ModelHandle:
        """Return the handle of `model`.

        Args:
            model: a sharded module.
            what: the function that asks, for the message.

        Raises:
            UserCodeError: it is not sharded.
        """
        found = getattr(model, _HANDLE, None)
        if not isinstance(found, cls):
            kind = type(model).__name__
            raise UserCodeError(
                f"{what}: this {kind} is not sharded: call model = zrun_core.shard(model) first"
            )
        return found


def shard(
    model: Model | Callable[[], Model],
    *,
    zero: int | Mapping[str, Any] = 0,
    precision: str | Mapping[str, Any] = "fp32",
    accumulate: int = 1,
    activations: Mapping[str, Any] | None = None,
    offload: str | Mapping[str, Any] | None = None,
    compile: bool = False,
    init: Literal["factory", "meta"] = "factory",
) -> Model:
    """Shard a model's states over the ranks in place, and return the module. Every rank calls it.

    The module is called, and its loss differentiated with `loss.backward()`, as before. Floating
    outputs are fp32 whatever the precision. Its parameters are unsharded only inside of its forward
    and inside of `gathered()`.

    Args:
        model: a factory, which runs once per host, or a module, of which the first rank's values
            are taken.
        zero: stage 0, 1, 2 or 3, or keys of a job's `zero` section.
        precision: fp32, bf16 or fp16, or keys of a job's `precision` section.
        accumulate: how many backward calls there will be per optimizer step. Above 1, a step takes
            the mean over those that were made, unless it is told a weight. At stages 0 and 1
            gradients are summed over ranks with the last of them only: another number of calls
            costs traffic, never the result.
        activations: keys of a job's `activations` section, such as `{"checkpoint": "full"}`. What
            waits on a disk does so in the run directory, or else in the current one.
        offload: "host" or "disk", where the optimizer's states and the gradients live between uses,
            or keys of a job's `offload` section. Its file is made in `offload.dir`, or else in the
            run directory or the current one.
        compile: torch.compile each repeated block.
        init: meta makes a factory's parameters shard by shard, by each module's own
            `reset_parameters`.

    Raises:
        JobError: an argument is wrong, or asks for what this model cannot do.
        PreflightError: the disk or the host has no room for states that are to live there.
        UserCodeError: the factory raised, or returned something else.
        HangError: not every rank called it.
    """
    run = current()
    zero_config = arguments.section("shard", "zero", ZeroConfig, zero)
    precision_config = arguments.section("shard", "precision", PrecisionConfig, precision)
    activations_config = arguments.section(
        "shard", "activations", ActivationsConfig, activations or {}
    )
    if activations_config.partition:
        raise JobError(
            f"shard(activations={activations!r}): partition divides inputs of blocks among ranks "
            "that share each layer, and here each rank has whole layers; leave partition out"
        )
    offload_config = _offload(offload, zero_config)
    write = "how many backward calls make a step, 1 or more"
    accumulate = arguments.whole("shard", "accumulate", accumulate, 1, write)
    if init not in ("factory", "meta"):
        raise JobError(f"shard(init={init!r}): write factory or meta")
    run._meet("shard()")
    shard_size = resolve_shard_size(zero_config, run.world_size, run._ranks_per_host)
    mesh = run._mesh(shard_size)
    folder = run.run_dir or Path.cwd()
    if offload_config.dir is not None:
        folder = Path(offload_config.dir)
    settings = replace(
        parallelize.shard_settings(
            zero_config, precision_config, activations_config, run.device, compile=compile
        ),
        placement=placement_of(offload_config, activations_config, run.device.type),
        schedule=offload_config.schedule,
        delay_after=offload_config.delay_after,
        disk_folder=str(folder),
    )
    with rng.fork_torch_rng(run.device):
        built = _build(model, init, run, mesh)
        tier = settings.placement.activation
        inputs = parallelize.offloaded_inputs(tier, mesh, run._comm, folder)
        parallelize.transform(
            built.module,
            zero_config,
            precision_config,
            activations_config,
            compile=compile,
            inputs=inputs,
        )
        sharded = ShardedModel(
            built.module,
            read_tiles(built.module, built.read),
            settings,
            mesh,
            run._comm,
            first_unit=run._num_units,
        )
    for note in _notes(sharded, inputs) if run.is_main else ():
        warnings.warn(note, stacklevel=2)
    built.module.to(run.device)  # buffers: the parameters are there
    _broadcast_buffers(built.module, run)
    run._num_units += len(sharded.units)
    run._models.add(sharded)
    built.module.__dict__[_HANDLE] = ModelHandle(
        run, sharded, sharded.use_implicit_passes(accumulate)
    )
    foreign.own(built.module)
    return cast(Model, built.module)


def forward(model: nn.Module) -> AbstractContextManager[None]:
    """Context in which parts of a sharded model are called: `with forward(model): model.part(x)`.

    Calling the model itself needs no context. Inside, its precision holds, as in its forward.
    """
    return ModelHandle.of(model, "forward()").loop.forward()


@contextmanager
def gathered(model: Model) -> Iterator[Model]:
    """Context in which every parameter of a sharded model is unsharded, to be read or written.

    Every rank enters and leaves it; inside, ranks may call the model for different lengths of time,
    e.g. to generate, or not at all. There are no gradients. Writes are kept; every rank must write
    the same values.

    Raises:
        HangError: not every rank entered it.
        UserCodeError: a forward has no backward yet.
    """
    handle = ModelHandle.of(model, "gathered()")
    handle.run._meet("gathered()")
    with handle.sharded.gathered():
        yield model


@contextmanager
def evaluation(model: Model) -> Iterator[Model]:
    """Context of an evaluation: no gradients, `eval()` mode, the first rank's buffers.

    Every rank enters it. The modules get their modes back. Inside, every rank must call the model
    equally often; where that cannot be, enter `gathered()` too.
    """
    handle = ModelHandle.of(model, "evaluation()")
    _broadcast_buffers(model, handle.run)
    modes = [(inner, inner.training) for inner in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield model
    finally:
        for inner, mode in modes:
            inner.training = mode


def _offload(offload: Any, zero: ZeroConfig) -> OffloadConfig:
    """Return the argument `offload` as a section of a job.

    Raises:
        JobError: it is not one, or asks for what only a job or another stage can have.
    """
    config = arguments.section(
        "shard", "offload", OffloadConfig, {} if offload is None else offload
    )
    if config.fraction == "auto":
        raise JobError(
            f"shard(offload={offload!r}): auto needs an estimate, which a job has; write the share "
            "of the states, such as 0.5"
        )
    if config.param != "device" and zero.stage != 3:
        raise JobError(
            f"shard(offload={offload!r}): parameters elsewhere than on the device need zero=3, "
            "which unshards them when they are used"
        )
    return config


def _notes(sharded: ShardedModel, inputs: OffloadedInputs | None) -> Iterator[str]:
    """Yield what is slower than it might be, or saves nothing, of memory beside the device."""
    if sharded.tiers is not None:
        yield from sharded.tiers.notes
    if inputs is not None and inputs.note:
        yield inputs.note


def _build(model: nn.Module | Callable[[], nn.Module], init: str, run: Run, mesh: Mesh) -> Built:
    if isinstance(model, nn.Module):
        return _adopt(model, run)
    if init == "meta":
        return build_on_meta(_factory(model), run.seed)
    with run._shared_folder(mesh) as folder:
        path = folder / "init"
        return build_once_per_host(_factory(model), run.seed, path, mesh.host, run._comm)


def _factory(function: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    if not callable(function):
        raise JobError(
            f"shard(): {type(function).__name__} is neither a module "
            "nor a function that returns one"
        )

    def build() -> nn.Module:
        with user_code("the model factory failed"):
            module = function()
        if not isinstance(module, nn.Module):
            raise UserCodeError(
                f"the model factory returned {type(module).__name__}, not an nn.Module"
            )
        return module

    return build


def _adopt(module: nn.Module, run: Run) -> Built:
    """Take a module that every rank has built, with the first rank's values.

    Raises:
        UserCodeError: it is sharded already, has no values, or differs between ranks.
    """
    if getattr(module, _HANDLE, None) is not None:
        raise UserCodeError(f"shard(): this {type(module).__name__} is sharded already")
    check(module)
    for name, param in module.named_parameters():
        if param.is_meta:
            raise UserCodeError(
                f"shard(): {name} has no values: pass the function that builds the model, "
                'init="meta"'
            )
    named = module.named_parameters()
    shapes = repr([(name, tuple(param.shape), param.requires_grad) for name, param in named])
    world = run._mesh(1).world
    if not run._comm.all_equal(zlib.crc32(shapes.encode()), world, name="shapes"):
        raise UserCodeError(
            "shard(): the ranks have built different models: build the same one everywhere"
        )

    def read(name: str, param: nn.Parameter) -> torch.Tensor:
        value = param.detach().to(run.device)
        run._comm.broadcast(value, world, name=name)
        return value

    return Built(module, read)


def _broadcast_buffers(module: nn.Module, run: Run) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            run._comm.broadcast(buffer, run._mesh(1).world, name=name)
