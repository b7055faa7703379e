"""Parameters that are read outside of their modules, where a rank would see a slice of them.

    loss + 0.01 * sum(param.pow(2).sum() for param in model.parameters())

In its module a slice is what the plan says, and ranks add up what it makes. A penalty, a norm or a
gram matrix in the loss, or in the forward of a module around, is of the whole parameter: ranks
gather it there (`whole_reads.py`), where all of them compute the same. It is refused where they do
not: within a region, and where each has a slice of the sequence.

[Note: how reads are followed]
In the forward without values the user's code finds a copy of a parameter in place of it, wherever
none of its modules runs. What operations do with copies is known by their memory, and what is made
of them by the graph.

[Note: gradients that ranks add up]
Of a parameter that all have whole and use on slices, each rank's gradient is a part, and parts are
added up. What is read of it outside has the same gradient on all ranks, of which one counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zrun_core.errors import JobError
from zrun_core.tensor_parallel.plan import TensorPlan
from zrun_core.tensor_parallel.reads import Read, Reads
from zrun_core.tensor_parallel.region_plan import Region
from zrun_core.tensor_parallel.sequence import hidden_states
from zrun_core.zero.passes.module_hooks import storage_of, tensors_in
from zrun_core.zero.wrap.lookups import Lookups, is_asked_by_user, users_line

_COPIES = ("_to_copy", "clone")  # of which the same is known
_WRITTEN = "and is written to there"
_SHAPES = ("size", "numel", "nelement", "shape", "dim", "__len__")


@dataclass
class _Use:
    """What one module does with a parameter of another one; where, as file and line.

    Attributes:
        outside: of regions; "": nothing.
        inside: on slices.
        before: by row of a region, in its module and in front of its columns; and why a slice
            would not do there.
        enters: what is made of it goes into a region, or where sequences are slices.
        shape: its shape alone, in the forward of the model or in the loss.
        refused: why it cannot be.
    """

    outside: str = ""
    inside: str = ""
    before: dict[str, tuple[str, str]] = field(default_factory=dict)
    enters: bool = False
    shape: str = ""
    refused: str = ""


class OutsideReads:
    """Looks for them in one forward of the whole model; or hands them out in one of a slice.

    Attributes:
        captured: by name of a divided parameter, the first line that reads it outside without
            looking it up there.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: TensorPlan,
        blocks: Sequence[Sequence[str]] = (),
        known: Reads | None = None,
    ) -> None:
        """
        Args:
            blocks: names of those that follow each other, where ranks have slices of the sequence.
            known: reads that were found, in a forward with slices; None: they are looked for.
        """
        self.captured: dict[str, str] = {}
        self._model = model
        self._plan = plan
        self._blocks = blocks
        self._known = known
        self._running: list[str] = []
        self._uses: dict[Read, _Use] = {}
        self._accessed: set[Read] = set()
        self._copies: dict[tuple[Read, bool], torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []  # copies of copies
        self._read_of: dict[int | None, Read] = {}  # by storage of a copy
        self._is_copying = False
        self._sliced: str = ""  # span whose blocks run, by the name of its first one
        self._names: dict[int | None, list[str]] = {}  # by storage, of a divided parameter
        self._true = self._own_storages(model)
        first = {id(param): name for name, param in model.named_parameters()}
        self._first = {
            name: first[id(param)] for name, param in model.named_parameters(remove_duplicate=False)
        }
        self._holders: dict[str, list[str]] = {}
        for name, of_all in self._first.items():
            self._holders.setdefault(of_all, []).append(name.rpartition(".")[0])
        self._around = [region.around for region in plan.regions if region.role is not None]

    def _own_storages(self, model: nn.Module) -> dict[int | None, str]:
        """Return the names of divided parameters by storage, where it has nothing else."""
        others = Counter(storage_of(param) for param in model.parameters())
        others.update(storage_of(buffer) for buffer in model.buffers())
        named = ((storage_of(param), n) for n, param in model.named_parameters())
        return {at: name for at, name in named if others[at] == 1 and self._is_divided(name)}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Know which modules run inside, and what is looked up."""
        with ExitStack() as stack:
            begin = self._model.register_forward_pre_hook(lambda *_: self._begin())
            stack.callback(begin.remove)
            for name, module in self._model.named_modules():
                self._look_into(name, module, stack)
                if not name:
                    continue

                def enter(_: nn.Module, args: Any, name: str = name) -> None:
                    self._running.append(name)

                def leave(_: nn.Module, args: Any, out: Any, name: str = name) -> None:
                    if self._running[-1:] == [name]:  # else a hook before `enter` has raised
                        self._running.pop()

                stack.callback(module.register_forward_pre_hook(enter).remove)
                handle = module.register_forward_hook(leave, always_call=True, prepend=True)
                stack.callback(handle.remove)
            if self._known is None:
                for span in self._blocks:
                    self._watch_span(span, stack)
                stack.enter_context(_Shapes(self._shape_read))
            yield

    def _look_into(self, prefix: str, module: nn.Module, stack: ExitStack) -> None:
        """Have what is looked up in a module be ours to hand out."""
        if not module._parameters:
            return

        def look(key: str) -> torch.Tensor | None:
            return self._look(self._first.get(f"{prefix}.{key}" if prefix else key), lookups, key)

        lookups = Lookups(module._parameters, look)
        module._parameters = lookups

        def put_back() -> None:
            if module._parameters is lookups:
                module._parameters = lookups.inner

        stack.callback(put_back)

    def _watch_span(self, span: Sequence[str], stack: ExitStack) -> None:
        """Know when sequences are slices: from the first of these blocks to the last."""
        given: list[Any] = []  # node of what is divided there

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._sliced = span[0]
            hidden = hidden_states(args, kwargs)
            given[:] = [each.grad_fn for each in tensors_in(hidden)]

        def leave(_: nn.Module, args: Any, out: Any) -> None:
            self._sliced = ""
            self.enter(out, given)

        first, last = (self._model.get_submodule(name) for name in (span[0], span[-1]))
        stack.callback(first.register_forward_pre_hook(enter, with_kwargs=True).remove)
        stack.callback(last.register_forward_hook(leave).remove)

    def _begin(self) -> None:
        """Find the parameters, which are fake by now."""
        self._running.clear()
        self._sliced = ""
        self._names.clear()
        for name, param in self._model.named_parameters(remove_duplicate=False):
            self._names.setdefault(storage_of(param), []).append(name)
        self._names = {
            storage: names
            for storage, names in self._names.items()
            if self._plan.tensors[names[0]].cut is not None
        }

    # Looking up

    def _look(self, name: str | None, lookups: Lookups, key: str) -> torch.Tensor | None:
        """Return what is found in place of a parameter; None: itself."""
        param = dict.get(lookups, key)
        if name is None or param is None or self._is_inside(name) or not is_asked_by_user():
            return None
        read = Read(self._running[-1] if self._running else "", name)
        if self._known is not None:
            if read not in self._known.whole and read not in self._known.shapes:
                return None
            shape = self._plan.tensors[name].shape
            whole = param.detach().new_empty(shape).requires_grad_(param.requires_grad)
            return as_parameter(whole)
        self._accessed.add(read)
        at = read, torch.is_grad_enabled()
        if at not in self._copies:
            self._is_copying = True
            try:
                copy = as_parameter(param.clone())
            finally:
                self._is_copying = False
            self._copies[at] = copy
            self._read_of[storage_of(copy)] = read
        return self._copies[at]

    def _is_inside(self, name: str) -> bool:
        """Return whether a parameter is where the plan has it: one of its modules runs."""
        holders = self._holders[name]
        if any(module in self._running for module in holders):
            return True
        return any(
            around in self._running and holder.startswith(f"{around}.")
            for around in self._around
            for holder in holders
        )

    # What is done with what was found

    def used(self, func: Any, args: Any, kwargs: Any, region: Region | None, is_open: bool) -> None:
        """See what an operation is given.

        Args:
            region: in which it is; None: in none.
            is_open: its columns have run.
        """
        if self._is_copying or self._known is not None or func.namespace == "prim":
            return  # the last are devices and layouts
        tensors = tensors_in((args, kwargs))
        for tensor in tensors:
            storage = storage_of(tensor)
            read = self._read_of.get(storage)
            if read is not None:
                why = _why_not(func, args, kwargs, tensor, tensors)
                self._note(read, why, region, is_open)
            elif storage in self._true:  # of which there may be no values: not even for a moment
                raise _captured({self._true[storage]: users_line()})
            elif storage in self._names:
                names = self._names[storage]
                if not any(name.startswith(f"{m}.") for name in names for m in self._running):
                    self.captured.setdefault(names[0], users_line())

    def made(self, func: Any, args: Any, out: Any) -> None:
        """See what an operation returns: a copy of a copy is one."""
        if self._is_copying or not self._read_of or not isinstance(out, torch.Tensor):
            return
        if func.overloadpacket.__name__ in _COPIES:
            read = self._read_of.get(storage_of(args[0]))
            if read is not None:
                self._kept.append(out)
                self._read_of[storage_of(out)] = read

    def enter(self, value: Any, stops: Collection[Any]) -> None:
        """See of what else a value is made where activations are slices.

        Args:
            stops: nodes of the graph that are their own way in.
        """
        nodes = {
            copy.grad_fn: read
            for (read, _), copy in self._copies.items()
            if copy.grad_fn is not None
        }
        if not nodes:
            return
        seen: set[Any] = set(stops)
        waiting = [tensor.grad_fn for tensor in tensors_in(value)]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in nodes:
                self._use(nodes[node]).enters = True
            waiting.extend(after for after, _ in node.next_functions)

    def asked(self, inputs: Any) -> None:
        """See of what gradients are asked for in the forward."""
        for tensor in tensors_in(inputs):
            read = self._read_of.get(storage_of(tensor))
            if read is not None and self._is_divided(read.name):
                self._refuse(read, "and a gradient of it is asked for")

    def _note(self, read: Read, why: str, region: Region | None, is_open: bool) -> None:
        use = self._use(read)
        is_divided = self._is_divided(read.name)
        if why == _WRITTEN and is_divided:
            self._refuse(read, why)
        elif self._sliced and region is None:
            if is_divided:
                self._refuse(read, "where each has a slice of the sequence (parallel.sequence)")
            use.inside = use.inside or users_line()
        elif region is None:
            use.outside = use.outside or users_line()
        elif is_open or self._sliced:
            use.inside = use.inside or users_line()
            if why and is_divided:
                self._refuse(read, why)
        else:
            use.before.setdefault(region.row, (users_line(), why))

    def _shape_read(self, tensor: torch.Tensor) -> None:
        read = self._read_of.get(storage_of(tensor))
        if read is not None and not read.reader and self._is_divided(read.name):
            use = self._use(read)
            use.shape = use.shape or users_line()

    def _use(self, read: Read) -> _Use:
        return self._uses.setdefault(read, _Use())

    def _refuse(self, read: Read, why: str) -> None:
        use = self._use(read)
        use.refused = use.refused or f"{users_line()}, {why}"

    def _is_divided(self, name: str) -> bool:
        return self._plan.tensors[name].cut is not None

    # What comes of it

    def refuse_captured(self) -> None:
        """Refuse reads of what was not looked up where it is read.

        Raises:
            JobError: there are some.
        """
        if self.captured:
            raise _captured(self.captured)

    def reads(
        self, unfit: Collection[str], partial: Callable[[str], bool], *, is_complete: bool
    ) -> Reads:
        """Return what ranks must gather.

        Args:
            unfit: rows of regions that begin at their columns, though their modules are around.
            partial: whether ranks add up gradients of a parameter, by its name.
            is_complete: the forward has come to its end.

        Raises:
            JobError: a read cannot be of the whole parameter.
        """
        whole: dict[Read, str] = {}
        shapes: dict[Read, str] = {}
        for read, use in self._uses.items():
            is_divided = self._is_divided(read.name)
            outside, inside = use.outside, use.inside
            for row, (line, why) in use.before.items():
                if row in unfit:
                    outside = outside or line
                    continue
                inside = inside or line
                if why and is_divided:
                    raise _refused(read, f"{line}, {why}")
            if use.refused:
                raise _refused(read, use.refused)
            if not is_divided and (use.enters or not partial(read.name)):
                continue
            if not outside:
                if use.shape and not inside and is_divided:
                    shapes[read] = use.shape
                continue
            if inside or use.enters:
                where = inside or outside
                raise _refused(
                    read, f"{where}, where activations are slices, and outside ({outside}) too"
                )
            if not is_complete:
                raise _refused(read, f"{outside}, and the forward cannot be followed to its end")
            whole[read] = outside
        lines = whole | shapes
        names = {read.name for read in lines}
        readers = {read.reader for read in self._accessed if read.name in names}
        looked_up = frozenset(read.name for read in self._accessed)
        return Reads(frozenset(whole), frozenset(shapes), frozenset(readers), lines, looked_up)


def as_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that says it is an `nn.Parameter`."""
    tensor._is_param = True
    return tensor


def _why_not(func: Any, args: Any, kwargs: Any, tensor: torch.Tensor, all_given: Any) -> str:
    """Return why an operation cannot be given a slice within a region; "": it can.

    It can look at it in another way, or use it on an activation, as a linear does.
    """
    storage = storage_of(tensor)
    names = [each.name for each in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
    for argument in func._schema.arguments:
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written = tensors_in(given.get(argument.name))
        if any(storage_of(each) == storage for each in written):
            return _WRITTEN
    if func.is_view or func.overloadpacket.__name__ in _COPIES:
        return ""
    others = [each for each in all_given if storage_of(each) != storage]
    if any(each.is_floating_point() and each.dim() for each in others):
        return ""
    return "where activations are slices"


class _Shapes(TorchFunctionMode):
    """Sees whose shape is looked at."""

    def __init__(self, see: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _SHAPES and args and isinstance(args[0], torch.Tensor):
            self._see(args[0])
        return func(*args, **(kwargs or {}))


# Messages

_ADVICE = (
    "make it of what modules return, leave it out (optim.weight_decay is a penalty too), or write "
    "tp: 1"
)


def _refused(read: Read, why: str) -> JobError:
    reader = read.reader or "the model or the loss function"
    return JobError(
        f"parallel.tp: {read.name} would be read outside of its module, by {reader} ({why}), and "
        f"each rank has a slice of it: {_ADVICE}"
    )


def _captured(found: Mapping[str, str]) -> JobError:
    first, place = next(iter(found.items()))
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return JobError(
        f"parallel.tp: {first}{more} would be read outside of its module ({place}), by what was "
        "kept of it before, and each rank has a slice of it: look it up where it is read "
        f"(self.head.weight, model.parameters()), {_ADVICE}"
    )
