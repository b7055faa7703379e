"""Check that a divided model computes what the whole one does, by forwards without values.

The first runs the whole model, and looks at the borders of its regions: what comes in other than by
the inputs of their modules, or goes on beside their linears. The second runs with the slices of one
rank. Both note over how many values sums go within each region: the width of a head, the keys of a
softmax. Where a rank sums over fewer, its result is no slice of the whole one:

    view(B, T, self.n_head, -1)      with n_head undivided: 12 heads of 32, in place of 6 of 64
    rms_norm(q)                      over all heads: each rank would have the norm of its own ones

They also note which columns of a linear's result are taken apart: see `fake_columns.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from zrun_core.errors import JobError, UserCodeError
from zrun_core.spine.sections.tensor_roles import Role
from zrun_core.spine.tracebacks import raised_at
from zrun_core.tensor_parallel.cuts import ALONE
from zrun_core.tensor_parallel.fake_columns import ColumnWatch, check_columns
from zrun_core.tensor_parallel.fake_outside import OutsideReads
from zrun_core.tensor_parallel.fake_sums import (
    PRODUCTS,
    looks_at_tokens,
    picks_tokens,
    summed_over,
)
from zrun_core.tensor_parallel.fit import counting_attributes
from zrun_core.tensor_parallel.plan import TensorPlan
from zrun_core.tensor_parallel.reads import Reads
from zrun_core.tensor_parallel.region_plan import Region
from zrun_core.tensor_parallel.roles import any_number
from zrun_core.tensor_parallel.second_grads import SecondGrads
from zrun_core.tensor_parallel.sequence import spans
from zrun_core.tensor_parallel.torch_attention import replace_forward
from zrun_core.user_code.asked_gradients import seeing_gradients
from zrun_core.zero.passes.module_hooks import tensors_in
from zrun_core.zero.wrap.fakes import fake_parameters, kept_buffers

_ERRORS = (UserCodeError, RuntimeError, TypeError, ValueError, IndexError)
_MAX_ZEROS = 100  # a loop that waits for another number ends then
_NARROW = "multiple of 16 bytes"  # in the words of torch's kernels


class CheckedPlan(NamedTuple):
    """A plan after its check.

    Attributes:
        plan: mended where it can be.
        note: why it could not be checked; "" if it was.
    """

    plan: TensorPlan
    note: str = ""


def check_on_fakes(
    model: nn.Module,
    plan: TensorPlan,
    forward: Callable[[], object],
    dtype: torch.dtype,
    device: torch.device,
    blocks: Sequence[str] = (),
) -> CheckedPlan:
    """Return the plan, mended where it can be.

    A region begins at its columns where its module adds its input to what its linears make, or gets
    it inside of something else than a tensor. Whole parameters that are used on slices are summed.
    What is read of parameters outside of their modules is noted in it. A model whose forward looks
    at values is not checked: a note says so, and it is mended by one that reads 0 for each of them.

    Args:
        model: whole, before it is transformed.
        forward: runs the loss of a batch, with autocast as in training.
        blocks: names of those where ranks will have slices of the sequence.

    Raises:
        JobError: a rank would compute something else, or fail.
    """
    whole = _Watch(model, plan, blocks)
    failed: Exception | None = None
    try:
        with kept_buffers(model), whole.installed(), fake_parameters(model, dtype, device):
            forward()
    except _ERRORS as error:
        failed = error
    seen = whole  # so far, if it has failed
    if failed is not None and _reads_values(failed):
        seen = _behind_values(model, plan, forward, dtype, device, blocks)
    for block, operation in (whole.mixing or seen.mixing).items():
        raise _mixes(block, operation)
    whole.outside.refuse_captured()
    reads = whole.reads(is_complete=failed is None)
    if failed is not None:
        return CheckedPlan(seen.mended_plan(plan.reads), _not_checked(failed))
    _check_regions(plan, whole)
    divided = _Watch(model, plan, reads=reads)
    shapes = _local_shapes(model, plan)
    try:
        with (
            kept_buffers(model),
            _divided(model, plan),
            divided.installed(),
            fake_parameters(model, dtype, device, shapes),
        ):
            forward()
    except _ERRORS as error:
        raise _failed(model, plan, divided.running, error) from error
    for region in plan.regions:
        pairs = zip(whole.sums[region.row], divided.sums[region.row], strict=False)
        for wanted, found in pairs:
            if wanted != found:
                raise _sums_less(model, plan, region, wanted, found)
    check_columns(plan, whole.columns.taken, divided.columns.taken)
    return CheckedPlan(whole.mended_plan(reads))


def _reads_values(error: Exception) -> bool:
    """Return whether a forward without values failed as it read one."""
    cause = error.__cause__ if isinstance(error, UserCodeError) and error.__cause__ else error
    return isinstance(cause, DataDependentOutputException)


def _behind_values(
    model: nn.Module,
    plan: TensorPlan,
    forward: Callable[[], object],
    dtype: torch.dtype,
    device: torch.device,
    blocks: Sequence[str],
) -> _Watch:
    """Return what a forward shows in which each number that is read is 0.

    That is as far as the forward gets so: behind `if x.max() > 100: return early`, say.
    """
    watch = _Watch(model, plan, blocks, zeros=_MAX_ZEROS)
    with (
        suppress(JobError, *_ERRORS),
        kept_buffers(model),
        watch.installed(),
        fake_parameters(model, dtype, device),
    ):
        forward()
    return watch


def _check_regions(plan: TensorPlan, whole: _Watch) -> None:
    for region in plan.regions:
        if region.row in whole.open:
            raise JobError(
                f"parallel.plan: {region.row} is not called after {region.columns[0]}, so nothing "
                "sums what ranks have: its weight is used otherwise than by calling it, or the "
                "column linear is called for something else too; write "
                + ", ".join(f"{name}: whole" for name in (*region.columns, region.row))
            )
        if region.row in whole.bypassed:
            raise _bypassed(region, whole.summed)


def _local_shapes(model: nn.Module, plan: TensorPlan) -> dict[int, tuple[int, ...]]:
    """Return shapes of slices within regions, by identity of the parameter.

    Embeddings, heads and linears that stand alone stay whole: what they make is.
    """
    parts = plan.parts(0)
    ends = (Role.VOCABULARY, Role.HEAD, *ALONE)
    whole = {
        id(param)
        for name, entry in plan.entries.items()
        if entry.role in ends
        for param in _params_of(model, name)
    }
    return {
        id(param): parts[name].local_shape
        for name, param in model.named_parameters()
        if id(param) not in whole
    }


def _params_of(model: nn.Module, name: str) -> list[nn.Parameter]:
    prefix, _, key = name.rpartition(".")
    param = model.get_submodule(prefix)._parameters.get(key)
    return [param] if param is not None else list(model.get_submodule(name).parameters())


@contextmanager
def _divided(model: nn.Module, plan: TensorPlan) -> Iterator[None]:
    """Have the attributes of a model divided inside."""
    before: list[tuple[nn.Module, str, int]] = []
    for path, value in plan.attributes.items():
        owner, _, key = path.rpartition(".")
        module = model.get_submodule(owner)
        before.append((module, key, getattr(module, key)))
        setattr(module, key, value)
    try:
        yield
    finally:
        for module, key, value in before:
            setattr(module, key, value)


# Messages


def _failed(
    model: nn.Module, plan: TensorPlan, region: Region | None, error: Exception
) -> JobError:
    failure = _failure(error)
    if region is None:
        return JobError(
            f"parallel.tp: with slices of its layers the model's forward {failure}; write "
            "parallel.plan, or tp: 1"
        )
    what_to_write = _what_to_write(model, plan, region)
    if _NARROW in failure:
        width = 8 * plan.degree
        what_to_write = (
            "the kernel that computes all experts at once takes rows of such a length only: write "
            f"a width of experts that {width} divides (in fp32 {width // 2}), "
            'model.config.experts_implementation = "eager" where the model is made, or '
            f"{any_number(region.row)}: whole in parallel.plan"
        )
    return JobError(
        f"parallel.tp: with the slices of {', '.join(region.columns)} the forward of "
        f"{region.around or 'the model'} {failure}; {what_to_write}"
    )


def _not_checked(error: Exception) -> str:
    return (
        "parallel.tp: not checked before training that ranks with slices compute what the whole "
        f"model does: without values its forward {_failure(error)}"
    )


def _failure(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, UserCodeError) and error.__cause__ else error
    place = raised_at(cause)
    where = f" at {place}" if place is not None else ""
    reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
    return f"fails{where}: {reason}"


def _mixes(block: str, operation: str) -> JobError:
    return JobError(
        f"parallel.sequence: {operation.strip('_')} in {block} looks at several tokens outside of "
        "what parallel.plan divides, where each rank has a slice of the sequence: write sequence: "
        "false"
    )


def _sums_less(
    model: nn.Module, plan: TensorPlan, region: Region, wanted: _Sum, found: _Sum
) -> JobError:
    name = wanted.name.strip("_")
    return JobError(
        f"parallel.tp: with the slices of {', '.join(region.columns)}, {name} in "
        f"{region.around or 'the model'} goes over {found.size} values in place of {wanted.size}, "
        "which makes something else than the whole model; " + _what_to_write(model, plan, region)
    )


def _bypassed(region: Region, summed: Collection[str]) -> JobError:
    around = f"{region.around}." if region.around else ""
    modules = {name.rpartition(".")[0] for name in summed if name.startswith(around)}
    named = ", ".join(f'"{any_number(name)}": summed' for name in sorted(modules - {region.around}))
    return JobError(
        f"parallel.plan: what {region.row} takes is made of the input of {region.around} beside "
        f"{', '.join(region.columns)} too, where its gradient would be of slices; write "
        + (named or ", ".join(f"{name}: whole" for name in (*region.columns, region.row)))
    )


def _what_to_write(model: nn.Module, plan: TensorPlan, region: Region) -> str:
    names = ", ".join(counting_attributes(model, plan.attributes, region))
    whole = ", ".join(f"{name}: whole" for name in (*region.columns, region.row))
    if not names:
        return f"read shapes from what the linears make, or write {whole}"
    return (
        f"if it counts heads by an attribute ({names}), write that one with divide in "
        f"parallel.plan; if by the shape of its input, read it from what the linears make; or "
        f"write {whole}"
    )


# The two forwards


class _Sum(NamedTuple):
    """An operation that sums, or looks for the largest.

    Attributes:
        name: as torch calls it.
        size: over how many values.
    """

    name: str
    size: int


class _Watch(TorchDispatchMode):
    """One forward, as seen from its regions.

    Attributes:
        sums: by row of a region, within it.
        open: rows of regions that have begun and not ended.
        running: the region that the forward is in.
        summed: names of whole parameters that are used on slices.
        bypassed: rows of regions into which more comes than by their modules.
        mixing: outside of regions, by block: an operation that looks at several tokens.
        columns: what is taken of what column linears make.
        outside: reads of divided parameters outside of their modules.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: TensorPlan,
        blocks: Sequence[str] = (),
        zeros: int = 0,
        reads: Reads | None = None,
    ) -> None:
        """Watch a model, whole or with slices.

        `blocks` are the names of those where ranks will have slices of the sequence. Of numbers
        without values, `zeros` may be read, as 0; the next one fails. `reads`, with slices, are
        those of whole parameters.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._zeros = zeros
        self.sums: dict[str, list[_Sum]] = defaultdict(list)
        self.open: set[str] = set()
        self.running: Region | None = None
        self.summed: set[str] = set()
        self.bypassed: set[str] = set()
        self.mixing: dict[str, str] = {}
        self.columns = ColumnWatch()
        self.outside = OutsideReads(model, plan, spans([blocks]), reads)
        self._second_grads = SecondGrads()
        self._blocks = blocks
        self._block = ""  # that the forward is in
        self._model = model
        self._plan = plan
        self._inputs: dict[str, list[torch.Tensor]] = {}  # by row: that a region has begun with
        self._columns: dict[str, list[Any]] = defaultdict(list)  # by row: nodes of its columns
        self._rows: dict[str, list[Any]] = defaultdict(list)  # by row: its nodes
        self._needs_module: set[str] = set()  # rows that take something made of the input beside
        self._unfit: set[str] = set()  # rows of regions whose modules will not do

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here

    def mended_plan(self, reads: Reads) -> TensorPlan:
        """Return the plan with what is known now.

        Regions begin where the gradient of their input is that of their linears, and whole
        parameters that are used on slices are summed.
        """
        regions = (
            replace(region, entries=region.columns) if region.row in self._unfit else region
            for region in self._plan.regions
        )
        summed = self._plan.summed | self.summed
        return replace(self._plan, regions=tuple(regions), summed=summed, reads=reads)

    def reads(self, *, is_complete: bool) -> Reads:
        """Return what is read of parameters outside of their modules.

        With `is_complete` the forward has come to its end.

        Raises:
            JobError: a rank would read something else.
        """
        summed = self._plan.summed | self.summed
        starts = tuple(f"{block}." for block in self._blocks)

        def is_partial(name: str) -> bool:
            return name in summed or name.startswith(starts)

        at_columns = {each.row for each in self._plan.regions if each.entries == each.columns}
        return self.outside.reads(self._unfit | at_columns, is_partial, is_complete=is_complete)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch the forwards inside."""
        with ExitStack() as stack:
            for region in self._plan.regions:
                if region.role is Role.ATTENTION:
                    attention: Any = self._model.get_submodule(region.around)
                    stack.callback(replace_forward(attention, None, region.around))
                hooks = self._hooks if region.role is None else self._hooks_of_module
                for handle in hooks(region):
                    stack.callback(handle.remove)
            for name in self._blocks:
                for handle in self._hooks_of_block(name):
                    stack.callback(handle.remove)
            stack.enter_context(self.outside.installed())
            stack.enter_context(self._second_grads.refused())
            stack.enter_context(
                seeing_gradients(lambda _, *args, **__: self.outside.asked(args[3]))
            )
            stack.enter_context(self)
            yield

    def _hooks_of_block(self, name: str) -> Iterator[Any]:
        block = self._model.get_submodule(name)

        def enter(_: nn.Module, args: Any) -> None:
            self._block = name

        def leave(_: nn.Module, args: Any, out: Any) -> None:
            self._block = ""

        yield block.register_forward_pre_hook(enter)
        yield block.register_forward_hook(leave)

    def _hooks(self, region: Region) -> Iterator[Any]:
        for name in region.entries:
            if name in region.columns:
                continue
            module = self._model.get_submodule(name)

            def enter(_: nn.Module, args: Any, kwargs: Any, region: Region = region) -> Any:
                return self._enter(region, args, kwargs)

            def leave(_: nn.Module, args: Any, out: Any, region: Region = region) -> None:
                self._check_output(region, out)

            yield module.register_forward_pre_hook(enter, with_kwargs=True)
            yield module.register_forward_hook(leave)
        for name in region.columns:
            module = self._model.get_submodule(name)

            def before(_: nn.Module, args: Any, region: Region = region) -> None:
                self._begin_column(region, args)

            def after(
                _: nn.Module,
                args: Any,
                out: torch.Tensor,
                region: Region = region,
                name: str = name,
            ) -> None:
                self._columns[region.row].append(out.grad_fn)
                self.columns.made(name, out)

            yield module.register_forward_pre_hook(before)
            yield module.register_forward_hook(after)
        row = self._model.get_submodule(region.row)

        def end(_: nn.Module, args: Any) -> None:
            self._end(region, args)

        def ended(_: nn.Module, args: Any, out: torch.Tensor) -> None:
            self._rows[region.row].append(out.grad_fn)
            self._second_grads.made(out)

        yield row.register_forward_pre_hook(end)
        yield row.register_forward_hook(ended)

    def _hooks_of_module(self, region: Region) -> Iterator[Any]:
        """Yield the hooks of a region that is a module, which begins with it."""
        module = self._model.get_submodule(region.around)
        row = self._model.get_submodule(region.row)

        def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
            self.open.add(region.row)
            return self._enter(region, args, kwargs)

        def end(_: nn.Module, args: Any) -> None:
            self._end(region, args)

        def leave(_: nn.Module, args: Any, out: Any) -> None:
            if row is module:
                self._end(region, out)
            self._second_grads.made(out)
            self._inputs.pop(region.row, None)

        yield module.register_forward_pre_hook(enter, with_kwargs=True)
        yield module.register_forward_hook(leave)
        if row is not module:
            yield row.register_forward_pre_hook(end)

    def _enter(self, region: Region, args: Any, kwargs: Any) -> Any:
        self.running = region
        leaves: list[torch.Tensor] = []

        def leaf(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return value
            leaves.append(value.detach().requires_grad_())
            self._second_grads.cut(leaves[-1], value)
            return leaves[-1]

        args = tuple(map(leaf, args))
        kwargs = {key: leaf(value) for key, value in kwargs.items()}
        self._inputs[region.row] = leaves
        return args, kwargs

    def _begin_column(self, region: Region, args: Any) -> None:
        self.open.add(region.row)
        self.running = region
        if region.entries == region.columns:
            return
        entry = self._model.get_submodule(region.entries[0])
        inside = {id(param) for param in entry.parameters()}
        inside |= {id(leaf) for leaf in self._inputs.get(region.row, ())}
        made_of, _ = _made_of(args, ())
        if region.row not in self._inputs or not made_of <= inside:
            self._unfit.add(region.row)

    def _end(self, region: Region, args: Any) -> None:
        self.open.discard(region.row)
        self.running = None
        leaves = {id(leaf) for leaf in self._inputs.get(region.row, ())}
        beside, _ = _made_of(args, self._columns[region.row])
        if beside & leaves:
            self._needs_module.add(region.row)
        beside -= leaves
        if not beside:
            return
        self.outside.enter(args, self._columns[region.row])
        around = f"{region.around}." if region.around else ""
        for name, param in self._model.named_parameters():
            if id(param) in beside and self._plan.tensors[name].cut is None:
                if name.startswith(around):
                    self.summed.add(name)
                else:
                    self.bypassed.add(region.row)

    def _check_output(self, region: Region, out: Any) -> None:
        """Look for what goes from the input of a module to its output beside the linears.

        Attention that hands out what it attends to hands out slices: that is no way around.
        """
        leaves = {id(leaf) for leaf in self._inputs.pop(region.row, ())}
        columns = self._columns.pop(region.row, [])
        rows = self._rows.pop(region.row, [])
        for tensor in tensors_in(out):
            made_of, reached = _made_of(tensor, [*columns, *rows])
            is_slice = not reached.isdisjoint(columns) and reached.isdisjoint(rows)
            if leaves & made_of and not is_slice:
                self._unfit.add(region.row)
                if region.row in self._needs_module:
                    self.bypassed.add(region.row)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        running = self.running
        is_open = running is not None and running.row in self.open
        self.outside.used(func, args, kwargs, running, is_open)
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" and self._zeros and isinstance(args[0], FakeTensor):
            self._zeros -= 1
            return torch.zeros((), dtype=args[0].dtype).item()
        is_in_block = bool(self._block) and running is None and self._block not in self.mixing
        if is_in_block and picks_tokens(name, args):  # which fails without values
            self.mixing[self._block] = name
        out = func(*args, **(kwargs or {}))
        self.outside.made(func, args, out)
        self.columns.used(name, (args, kwargs), out)
        if self.running is not None:
            if self.running.role is Role.EXPERTS and name in PRODUCTS:
                return out  # with the weights: over slices of the width
            for size in summed_over(name, args, out):
                self.sums[self.running.row].append(_Sum(name, size))
        elif is_in_block and looks_at_tokens(name, args, out):
            self.mixing[self._block] = name
        return out


def _made_of(value: Any, stops: Sequence[Any]) -> tuple[set[int], set[Any]]:
    """Return what tensors were made of, as autograd knows.

    Nodes of the graph that are in `stops` are not followed.

    Returns:
        The identities of the tensors that gradients would come to, and the stops on the way.
    """
    found: set[int] = set()
    reached: set[Any] = set()
    seen: set[Any] = set()
    waiting: list[Any] = []
    for tensor in tensors_in(value):
        if tensor.grad_fn is not None:
            waiting.append(tensor.grad_fn)
        elif tensor.requires_grad:
            found.add(id(tensor))
    while waiting:
        node = waiting.pop()
        if node in stops:
            reached.add(node)
        elif node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                found.add(id(node.variable))
            waiting.extend(after for after, _ in node.next_functions if after is not None)
    return found, reached
