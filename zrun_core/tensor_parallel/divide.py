"""Divide the layers of a built model over the ranks of a tensor group, in place.

    before, on every rank            on rank 0                  on rank 1
    q_proj.weight [4096, 4096]       rows 0 to 2047             rows 2048 to 4095
    o_proj.weight [4096, 4096]       columns 0 to 2047          columns 2048 to 4095
    norm.weight [4096]               all of it                  all of it

Parameters keep their names and their modules, and become smaller. Their values are read whole, one
at a time, and cut: see `Divided.read`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zrun_core.errors import JobError
from zrun_core.memory.tensors import TENSOR, TensorPart
from zrun_core.spine.sections.tensor_roles import Entry, Role
from zrun_core.spine.tracebacks import first_line
from zrun_core.tensor_parallel.cuts import ALONE
from zrun_core.tensor_parallel.late_reads import LateReads
from zrun_core.tensor_parallel.lone_linears import divide_lone
from zrun_core.tensor_parallel.plan import TensorPlan
from zrun_core.tensor_parallel.region_plan import Region
from zrun_core.tensor_parallel.regions import Regions, count_once
from zrun_core.tensor_parallel.sequence import slice_between, spans
from zrun_core.tensor_parallel.tensor_comm import TensorComm
from zrun_core.tensor_parallel.vocabulary import Vocabulary
from zrun_core.tensor_parallel.vocabulary_layers import divide_embedding, divide_head
from zrun_core.tensor_parallel.whole_reads import WholeReads, cut_out
from zrun_core.user_code.grad_hooks import has_late_hooks, hooks_of, made_by
from zrun_core.zero.wrap.foreign import lacks_params

Read = Callable[[str, nn.Parameter], torch.Tensor]


@dataclass(frozen=True)
class Divided:
    """A model of which this rank has slices.

    Attributes:
        table: by name of a parameter, its part of a tensor of the whole model.
        regions: where activations are slices.
        reads: of whole parameters outside of their modules; None: there are none.
        late_reads: those that the first forward does not make.
        attributes: of modules, which count what this rank has of them, and what all have.
    """

    table: Mapping[str, TensorPart]
    regions: Regions
    reads: WholeReads | None
    late_reads: LateReads
    attributes: Sequence[tuple[nn.Module, str, Any]]
    _whole: Mapping[str, tuple[nn.Module, Mapping[str, nn.Parameter]]]

    def divides(self, module: str) -> bool:
        """Return whether this rank has slices of a module's parameters."""
        parts = (part for name, part in self.table.items() if name.startswith(f"{module}."))
        return any(part.shape != part.local_shape for part in parts)

    def read(self, read: Read) -> Read:
        """Return a function that reads this rank's parts of what `read` reads.

        Args:
            read: value of a parameter by its name, given the parameter of the whole model.
        """

        def read_part(name: str, param: nn.Parameter) -> torch.Tensor:
            if name not in self._whole:
                return read(name, param)
            module, whole = self._whole[name]
            key = name.rpartition(".")[2]
            ours = module._parameters
            # A module that is reset makes the values of all of its parameters.
            module._parameters = {**ours, **whole}
            try:
                value = read(name, whole[key])
            finally:
                module._parameters = ours
            return cut_out(value, self.table[name])

        return read_part

    def replaced(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield each parameter that is a slice, and the whole one that it is in place of."""
        for name, (module, whole) in self._whole.items():
            key = name.rpartition(".")[2]
            part = module._parameters[key]
            assert part is not None
            yield part, whole[key]


def divide(
    model: nn.Module,
    plan: TensorPlan,
    comm: TensorComm,
    chunks: Sequence[Sequence[str]] = (),
    elsewhere: Collection[str] = (),
) -> Divided:
    """Give a rank its slices of a model's layers, in place.

    Args:
        model: the user's, before it is transformed and sharded.
        comm: of the ranks that have slices of the same layers.
        chunks: names of blocks that are computed one after the other, between whose first and last
            one each rank has a slice of the sequence; none: sequences stay whole.
        elsewhere: names of modules that other stages of a pipeline run. This one may have their
            parameters, which others read.

    Raises:
        JobError: sequences cannot be divided in a region.
    """
    regions = Regions(comm)

    def runs_here(name: str) -> bool:
        return not any(name == each or name.startswith(f"{each}.") for each in elsewhere)

    entries = {name: entry for name, entry in plan.entries.items() if runs_here(name)}
    here = dict(model.named_parameters())  # a stage of a pipeline has not all
    table = {name: part for name, part in plan.parts(comm.index).items() if name in here}
    sizes = {
        name: module.get_parameter("weight").shape[0]
        for name, module in model.named_modules()
        if name in entries
        and entries[name].role in (Role.VOCABULARY, Role.HEAD)
        and not lacks_params(module)
    }
    whole = _replace_params(model, table)
    attributes: list[tuple[nn.Module, str, Any]] = []
    for path, value in plan.attributes.items():
        owner, _, attribute = path.rpartition(".")
        module = model.get_submodule(owner)
        # Else it is a ghost, which hands out whole tensors.
        if runs_here(owner) and not lacks_params(module):
            attributes.append((module, attribute, getattr(module, attribute)))
            setattr(module, attribute, value)
    once = [name for name, entry in entries.items() if entry.role is Role.ONCE]
    count_once(model, once, comm.size)
    blocks = {name for span in spans(chunks) for name in span}
    if chunks and not blocks:
        raise JobError(
            f"parallel.sequence: {type(model).__name__} has no repeated blocks, between which a "
            "sequence could be slices: write sequence: false"
        )
    own = [region for region in plan.regions if runs_here(region.row)]
    _install_regions(model, own, regions, blocks)
    _divide_vocabulary(model, entries, sizes, comm)
    _divide_lone(model, entries, comm)
    in_blocks = set()
    for span in spans(chunks):
        slice_between(model, span, regions.slices)
        for name in span:
            _check_alone(plan, name)
            regions.draw_in(model.get_submodule(name))
            in_blocks |= {param for param in table if param.startswith(f"{name}.")}
    for name, part in table.items():
        if name in in_blocks and TENSOR in part.replicated_over:
            table[name] = replace(part, partial_over=(TENSOR,))
    for name in plan.summed & table.keys() - in_blocks:
        model.get_parameter(name).register_hook(_summed(comm, name))
    reads = WholeReads(model, plan, comm, table) if plan.reads.names else None
    return Divided(table, regions, reads, LateReads(model, plan, table), attributes, whole)


def _install_regions(
    model: nn.Module, own: Sequence[Region], regions: Regions, blocks: Collection[str]
) -> None:
    """Let regions begin and end in a model, those that run on this rank.

    `blocks` are the names of those where this rank has a slice of the sequence.

    Raises:
        JobError: sequences cannot be divided in one.
    """
    for region in own:
        is_sliced = any(region.row.startswith(f"{block}.") for block in blocks)
        if is_sliced and (reason := region.rejects_sequence(model)):
            raise JobError(f"parallel.sequence: {reason}; write sequence: false")
        if not lacks_params(model.get_submodule(region.row)):
            regions.install(model, region, is_sliced=is_sliced)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # only its layers' fused kernel knows nested ones


def _check_alone(plan: TensorPlan, block: str) -> None:
    """Check that nothing in a block gathers widths, where each rank has a slice of the sequence.

    Raises:
        JobError: something does.
    """
    for name, entry in plan.entries.items():
        if entry.role in ALONE and name.startswith(f"{block}."):
            raise JobError(
                f"parallel.sequence: {name} is {entry.role}, between whole activations, and {block}"
                " has slices of the sequence there: write sequence: false"
            )


def _replace_params(
    model: nn.Module, table: Mapping[str, TensorPart]
) -> dict[str, tuple[nn.Module, dict[str, nn.Parameter]]]:
    """Replace parameters by this rank's parts of them.

    Returns:
        By name of a replaced one, its module, and the ones of that module before.

    Raises:
        JobError: a hook on one does not make of a slice what it makes of the whole gradient.
    """
    whole: dict[str, tuple[nn.Module, dict[str, nn.Parameter]]] = {}
    made: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        of_module: dict[str, nn.Parameter] = {}
        for key, param in module._parameters.items():
            name = f"{prefix}.{key}" if prefix else key
            part = table.get(name)
            if param is None or part is None or part.local_shape == tuple(param.shape):
                continue  # or a tied one, under another name than its first
            _check_hooks(name, param, part)
            of_module[key] = param
            whole[name] = module, of_module
            made[id(param)] = _local(param, part)
    for module in model.modules():  # a tied one lies in several
        for key, param in module._parameters.items():
            if param is not None and id(param) in made:
                module._parameters[key] = made[id(param)]
    return whole


_OF_HOOKS = (
    "have it change each element by itself, or write `whole` for this module in parallel.plan, or "
    "tp: 1"
)


def _check_hooks(name: str, param: nn.Parameter, part: TensorPart) -> None:
    """Give the hooks of a parameter a gradient that is drawn, whole and this rank's part of it."""
    if has_late_hooks(param):
        raise JobError(
            f"parallel.tp: {name} has a hook that runs once its gradient is there, and each rank "
            "has a slice of it: use Tensor.register_hook, write `whole` for this module in "
            "parallel.plan, or tp: 1"
        )
    generator = torch.Generator().manual_seed(0)
    for hook in hooks_of(param):
        grad = torch.randn(part.shape, generator=generator)
        try:
            of_whole = made_by(hook, grad.clone())
            of_part = made_by(hook, cut_out(grad, part).clone())
        except Exception as error:
            raise JobError(
                f"parallel.tp: a hook on {name} fails on a slice of its gradient, and each rank "
                f"has a slice: {first_line(error)}; {_OF_HOOKS}"
            ) from error
        expected = cut_out(of_whole, part)
        if not torch.allclose(of_part, expected, rtol=1e-4, atol=1e-6):
            raise JobError(
                f"parallel.tp: a hook on {name} makes something else of a slice of its gradient "
                f"than of the whole, as a norm or a mean of it does, and each rank has a slice: "
                f"{_OF_HOOKS}"
            )


def _divide_vocabulary(
    model: nn.Module, entries: Mapping[str, Entry], sizes: Mapping[str, int], comm: TensorComm
) -> None:
    """Let embeddings look up their own rows only, and heads make their own logits only.

    `sizes` are those of the vocabulary, by name of a module.
    """
    for name, size in sizes.items():
        vocabulary = Vocabulary(size, comm, name)
        divides = divide_head if entries[name].role is Role.HEAD else divide_embedding
        divides(model.get_submodule(name), vocabulary)


def _divide_lone(model: nn.Module, entries: Mapping[str, Entry], comm: TensorComm) -> None:
    """Let linears that stand alone compute with their slices."""
    for name, entry in entries.items():
        if entry.role not in ALONE:
            continue
        linear = model.get_submodule(name)
        if isinstance(linear, nn.Linear) and not lacks_params(linear):
            divide_lone(linear, entry.role, comm, name)


def _local(param: nn.Parameter, part: TensorPart) -> nn.Parameter:
    """Return a parameter of this rank's part, without memory, like the one of the whole tensor."""
    hollow = torch.empty_strided(
        part.local_shape, part.local_stride, dtype=param.dtype, device=param.device
    )
    if not hollow.is_meta:
        hollow.untyped_storage().resize_(0)
    local = nn.Parameter(hollow, requires_grad=param.requires_grad)
    vars(local).update(vars(param))
    local._backward_hooks = param._backward_hooks  # torch keeps them beside `vars`
    return local


def _summed(comm: TensorComm, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a hook that sums the gradient of a parameter which regions use on slices."""
    return lambda grad: comm.all_reduce(grad, f"gradient of {name}")
