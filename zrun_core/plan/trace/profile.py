"""A model and what its micro-batches take, as data: `Profile`, with a `Trace` for each policy.

A profile comes from tracing the user's model (`tracer.py`) and is stored as JSON. Nothing here
needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from zrun_core.memory.tensors import ElementRun, TensorPart
from zrun_core.plan.trace.folding import fold, unfold
from zrun_core.plan.trace.late_weights import with_late_weights
from zrun_core.plan.trace.peak import Lifetimes
from zrun_core.plan.trace.rows import (
    AFFINE_FIELDS,
    EMPTY_ROW,
    Affine,
    Operator,
    Rows,
    Vocabulary,
    distinct,
    same_but,
)
from zrun_core.plan.trace.waiting_inputs import with_divided_inputs, without_waiting_inputs

if TYPE_CHECKING:
    from zrun_core.stages.flow import ModelFlow

FORMAT = 15  # of the JSON
# Torch's compiler, which a CPU rank imports by recomputing, and by building some models on meta, as
# all ranks do with init: meta, and all but the first one of a host without it; measured.
COMPILER_BYTES = 72 << 20
# Columns of the JSON's tables; of the others, all values are those of `EMPTY_ROW`.
_EVENT_FIELDS = ("tensor", "alloc", "phase", "module", "block", "kind", "accumulates", "size")
_OP_FIELDS = ("operator", "phase", "module", "block", "size", "flops")
Source = Literal["traced", "measured on the CPU", "states alone"]


@dataclass(frozen=True, eq=False)
class Trace:
    """Forward, loss and backward of one micro-batch, in order, all blocks written out.

    Attributes:
        checkpoint: "none", "full", "every_n" or "selective".
        events: rows of memory that comes or goes, [events] of `ROW`.
        ops: rows of operators that run, [operators] of `ROW`.
        modules: names of the modules in them, each once.
        operators: the distinct operators in them.
        exact: traces of micro-batches for which the affine sizes do not hold.
    """

    checkpoint: str
    events: Rows
    ops: Rows
    modules: tuple[str, ...]
    operators: tuple[Operator, ...]
    exact: Mapping[int, Trace] = field(default_factory=dict)

    @classmethod
    def of_rows(cls, checkpoint: str, rows: Rows, vocabulary: Vocabulary) -> Trace:
        """Return a trace of `rows`, with no more than the modules and operators in them.

        Args:
            rows: events and operators, in order.
        """
        rows = rows.copy()
        modules, rows["module"] = distinct(rows["module"])
        is_op = rows["operator"] >= 0
        operators, rows["operator"][is_op] = distinct(rows["operator"][is_op])
        return cls(
            checkpoint,
            rows[~is_op],
            rows[is_op],
            tuple(vocabulary.modules.values[number] for number in modules.tolist()),
            tuple(vocabulary.operators.values[number] for number in operators.tolist()),
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Trace)
            and self.checkpoint == other.checkpoint
            and self.modules == other.modules
            and self.operators == other.operators
            and same_but(self.events, other.events)
            and same_but(self.ops, other.ops)
            and self.exact == other.exact
        )

    __hash__ = None  # type: ignore[assignment]

    def of(self, micro: int) -> Trace:
        """Return the trace that holds for `micro` samples."""
        return self.exact.get(micro, self)

    def with_inputs_apart(self, every: int, *, ranks: int, away: bool) -> Trace:
        """Return the same with the inputs of recomputed blocks kept apart until backward.

        Args:
            every: one block in so many is recomputed.
            ranks: that divide them; 1: they are whole.
            away: they are elsewhere than on the device.
        """
        key = every, ranks, away
        found = self._apart.get(key)
        if found is None:
            exact = {
                micro: trace.with_inputs_apart(every, ranks=ranks, away=away)
                for micro, trace in self.exact.items()
            }
            if ranks > 1:
                events = with_divided_inputs(self.events, every, ranks, away=away)
            else:
                events = without_waiting_inputs(self.events, every)
            found = self._apart[key] = replace(self, events=events, exact=exact)
        return found

    @cached_property
    def _apart(self) -> dict[tuple[int, int, bool], Trace]:
        return {}

    def with_late_weights(self, *, adds_others: bool) -> Trace:
        """Return the same with the gradients of weights made in a later pass.

        Args:
            adds_others: gradients of what lies outside of blocks are added up at once.
        """
        found = self._late.get(adds_others)
        if found is None:
            exact = {
                micro: trace.with_late_weights(adds_others=adds_others)
                for micro, trace in self.exact.items()
            }
            rows = self.events, self.ops, self.modules, self.operators
            events = with_late_weights(*rows, adds_others=adds_others)
            found = self._late[adds_others] = replace(self, events=events, exact=exact)
        return found

    @cached_property
    def _late(self) -> dict[bool, Trace]:
        return {}

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """The times at which its tensors come and go."""
        return Lifetimes(self.events, self.modules)

    def to_json(self) -> dict[str, Any]:
        """Return the trace as plain values, repeated blocks written once."""
        return {
            "checkpoint": self.checkpoint,
            "modules": self.modules,
            "operators": self.operators,
            "events": _table_to_json(self.events, _EVENT_FIELDS),
            "ops": _table_to_json(self.ops, _OP_FIELDS),
            "exact": {str(micro): trace.to_json() for micro, trace in self.exact.items()},
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Trace:
        """Return the trace that `to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError, IndexError: it is not that.
        """
        operators = tuple(
            Operator(name, family, dtype, tuple(shape), is_inner)
            for name, family, dtype, shape, is_inner in found["operators"]
        )
        return cls(
            found["checkpoint"],
            _table_from_json(found["events"], _EVENT_FIELDS),
            _table_from_json(found["ops"], _OP_FIELDS),
            tuple(found["modules"]),
            operators,
            {int(micro): cls.from_json(trace) for micro, trace in found["exact"].items()},
        )


def _table_to_json(rows: Rows, fields: Sequence[str]) -> dict[str, Any]:
    """Return columns of `rows`: sizes as numbers of distinct ones, repeated blocks folded."""
    affine = [name for name in fields if name in AFFINE_FIELDS]
    sizes, numbers = distinct(np.concatenate([rows[name] for name in affine]))
    columns = dict(zip(affine, np.split(numbers, len(affine)), strict=True))
    table = np.stack([columns.get(name, rows[name]) for name in fields], axis=1).astype(np.int64)
    begins = (rows["block"] >= 0) & (np.diff(rows["block"], prepend=-1) != 0)
    runs = fold(table, np.flatnonzero(begins).tolist())
    return {"sizes": sizes.tolist(), "rows": runs}


def _table_from_json(found: Mapping[str, Any], fields: Sequence[str]) -> Rows:
    """Return the rows that `_table_to_json` wrote."""
    sizes = np.array(found["sizes"], dtype=np.float64).reshape(-1, 2)
    table = unfold(found["rows"], len(fields))
    rows = np.full(len(table), EMPTY_ROW)
    for name, column in zip(fields, table.T, strict=True):
        rows[name] = sizes[column] if name in AFFINE_FIELDS else column
    return rows


@dataclass(frozen=True)
class ParamInfo:
    """A parameter, under its first name.

    Attributes:
        name: its first one.
        shape: of the parameter.
        dtype: in which the model computes with it.
        trainable: whether it is trained.
        block: number of the repeated block that it lies in; -1 outside.
        stride: of the parameter, without gaps.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    block: int = -1
    stride: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class ModuleInfo:
    """A module of the tree, of which `module_tree.py` makes one that is cut into the same units.

    Attributes:
        name: in the tree.
        kind: equal for modules of one class.
        container: "list", "sequential", "tiles of dimension 0" (of a weight), or "" of others.
        running: whether it is a norm with running statistics.
        params: its own parameters: (attribute, first name of the parameter).
        same_as: first name of the module, where it is registered under several.
    """

    name: str
    kind: int
    container: str = ""
    running: bool = False
    params: tuple[tuple[str, str], ...] = ()
    same_as: str = ""


@dataclass(frozen=True)
class Profile:
    """A model and what its micro-batches take.

    Attributes:
        source: of its traces.
        why: reason of a fallback, and what else the numbers do not cover; "" if there is none.
        params: its parameters.
        buffer_bytes: of the modules' buffers.
        num_blocks: repeated blocks.
        batch_bytes: of one micro-batch's tensors. They are no events: on a CPU all micro-batches of
            a step are held.
        tokens_per_sample: None where samples are no tokens.
        traces: by checkpointing policy; none if the source is "states alone".
        untraced: why others were not traced, by policy.
        unknown: policies whose traces are empty, because nothing is known of them.
        notes: what a reader should know that is no fallback.
        follows_values: whether sizes of tensors do, as where tokens are dropped by a mask.
        files: digests of the files of code that it came from, by path.
        is_ragged: samples differ in size: these are batches of the longest.
        num_samples: of the training data; None: it does not say, or was not opened.
        sample_s: seconds of a core that a usual sample takes to be read; 0: not known.
        evaluation_bytes: of a micro-batch of the largest evaluation, with what it holds at most; 0
            where there is none, or none was followed.
        generation_bytes: that the bundled hook holds at most while it makes text; 0: there is none.
        hooks_gather: a hook has all parameters of a rank whole at once.
        usual_share: of the work of these batches that usual ones have, where samples differ.
        tracing_bytes: that the process took at most which traced it; 0: not known.
        is_partial: time was over before all of it was traced.
        flow: what flows through it, by which a pipeline is cut; None: `why_no_flow`, or not known.
        flow_micro: samples of the batch that was followed.
        why_no_flow: why no pipeline can be made of it.
        imported_bytes: of a process, that the user's code and data add to it, besides tensors of
            the model and torch's compiler; 0 where it was not measured.
        builds_with_compiler: whether building it on the meta device imports torch's compiler.
        table: as of `ShardedModel`, where it is one tensor-parallel rank's part of a model; else
            empty.
    """

    source: Source
    why: str
    params: tuple[ParamInfo, ...]
    buffer_bytes: int
    num_blocks: int
    batch_bytes: Affine
    tokens_per_sample: int | None
    traces: Mapping[str, Trace]
    modules: tuple[ModuleInfo, ...] = ()
    device: str = "cpu"  # whose kernels the trace follows: "cpu" or "cuda"
    notes: tuple[str, ...] = ()
    follows_values: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    untraced: Mapping[str, str] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()
    is_ragged: bool = False
    num_samples: int | None = None
    sample_s: float = 0.0
    evaluation_bytes: Affine = field(default_factory=partial(Affine, 0.0, 0.0))
    generation_bytes: int = 0
    hooks_gather: bool = False
    usual_share: float = 1.0
    tracing_bytes: int = 0
    is_partial: bool = False
    flow: ModelFlow | None = None
    flow_micro: int = 1
    why_no_flow: str = ""
    imported_bytes: int = 0
    builds_with_compiler: bool = True
    table: Mapping[str, TensorPart] = field(default_factory=dict)

    @property
    def num_params(self) -> int:
        return sum(param.numel for param in self.params)

    def source_of(self, policy: str) -> Source:
        """Return what the trace of a checkpointing policy comes from."""
        return "states alone" if policy in self.unknown else self.source

    def to_json(self) -> str:
        """Return the profile as text."""
        return json.dumps(
            {
                "format": FORMAT,
                "source": self.source,
                "why": self.why,
                "params": [
                    [p.name, p.shape, p.dtype, p.trainable, p.block, p.stride] for p in self.params
                ],
                "buffer_bytes": self.buffer_bytes,
                "num_blocks": self.num_blocks,
                "batch_bytes": [self.batch_bytes.base, self.batch_bytes.per_sample],
                "tokens_per_sample": self.tokens_per_sample,
                "traces": {name: trace.to_json() for name, trace in self.traces.items()},
                "modules": [
                    [m.name, m.kind, m.container, m.running, m.params, m.same_as]
                    for m in self.modules
                ],
                "device": self.device,
                "notes": self.notes,
                "follows_values": self.follows_values,
                "files": dict(self.files),
                "untraced": dict(self.untraced),
                "is_ragged": self.is_ragged,
                "num_samples": self.num_samples,
                "sample_s": self.sample_s,
                "generation_bytes": self.generation_bytes,
                "hooks_gather": self.hooks_gather,
                "tracing_bytes": self.tracing_bytes,
                "usual_share": self.usual_share,
                "evaluation_bytes": [
                    self.evaluation_bytes.base,
                    self.evaluation_bytes.per_sample,
                ],
                "flow": None if self.flow is None else asdict(self.flow),
                "flow_micro": self.flow_micro,
                "why_no_flow": self.why_no_flow,
                "imported_bytes": self.imported_bytes,
                "builds_with_compiler": self.builds_with_compiler,
                "table": {name: [*vars(part).values()] for name, part in self.table.items()},
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Profile:
        """Return the profile that `to_json` wrote.

        Raises:
            ValueError: it is not that.
        """
        try:
            found = json.loads(text)
            if found["format"] != FORMAT:
                raise ValueError(f"a profile of format {found['format']}, not {FORMAT}")
            return cls(
                source=found["source"],
                why=found["why"],
                params=tuple(
                    ParamInfo(name, tuple(shape), dtype, trainable, block, tuple(stride))
                    for name, shape, dtype, trainable, block, stride in found["params"]
                ),
                buffer_bytes=found["buffer_bytes"],
                num_blocks=found["num_blocks"],
                batch_bytes=Affine(*found["batch_bytes"]),
                tokens_per_sample=found["tokens_per_sample"],
                traces={name: Trace.from_json(trace) for name, trace in found["traces"].items()},
                modules=tuple(
                    ModuleInfo(
                        name, kind, container, running, tuple((a, p) for a, p in params), same_as
                    )
                    for name, kind, container, running, params, same_as in found["modules"]
                ),
                device=found["device"],
                notes=tuple(found["notes"]),
                follows_values=found["follows_values"],
                files=found["files"],
                untraced=found["untraced"],
                is_ragged=found["is_ragged"],
                num_samples=found["num_samples"],
                sample_s=found["sample_s"],
                generation_bytes=found["generation_bytes"],
                hooks_gather=found["hooks_gather"],
                tracing_bytes=found["tracing_bytes"],
                usual_share=found["usual_share"],
                evaluation_bytes=Affine(*found["evaluation_bytes"]),
                flow=None if found["flow"] is None else _flow_from_json(found["flow"]),
                flow_micro=found["flow_micro"],
                why_no_flow=found["why_no_flow"],
                imported_bytes=found["imported_bytes"],
                builds_with_compiler=found["builds_with_compiler"],
                table={name: _part_from_json(part) for name, part in found["table"].items()},
            )
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"not a profile: {error!r}") from None


def _part_from_json(found: Sequence[Any]) -> TensorPart:
    """Return the part of which `found` are the attributes."""
    tensor, shape, stride, local_shape, local_stride, runs, replicated_over, partial_over = found
    return TensorPart(
        tensor,
        tuple(shape),
        tuple(stride),
        tuple(local_shape),
        tuple(local_stride),
        tuple(ElementRun(*run) for run in runs),
        tuple(replicated_over),
        tuple(partial_over),
    )


def _flow_from_json(found: Mapping[str, Any]) -> ModelFlow:
    """Return the flow that `asdict` wrote."""
    from zrun_core.stages.flow import Leaf, ModelFlow, NodeCall, OutsideUse

    return ModelFlow(
        tuple(found["blocks"]),
        tuple(found["flops"]),
        {name: tuple(segments) for name, segments in found["uses"].items()},
        tuple(NodeCall(**call) for call in found["calls"]),
        tuple(Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for leaf in found["leaves"]),
        tuple(
            OutsideUse(use["param"], use["segment"], tuple(use["used_in"]))
            for use in found["outside"]
        ),
        found["uncounted"],
        found["collecting"],
        found["differentiates"],
    )
