"""A job's model as a pass runs through it: on fake tensors, or on the CPU with values.

Nothing of the size of the model is allocated for fake tensors: it is built on the meta device where
its factory bears that, and its parameters become fake tensors in the compute dtype, as flat units
have them. A model that looks at values cannot be run so: it is built for real then, with few of its
blocks, and runs under the same recorder.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from zrun_core.activations.checkpoint import apply_checkpointing
from zrun_core.activations.kv_cache import omit_cache
from zrun_core.data.batch import map_tensors
from zrun_core.errors import UserCodeError, ZrunError
from zrun_core.memory.layout import dense_stride
from zrun_core.memory.tensors import TensorPart
from zrun_core.plan.trace.block_extrapolation import BlocksDifferError, BlockSeries, shortened
from zrun_core.plan.trace.divided_model import divide_alone
from zrun_core.plan.trace.module_tree import describe_params
from zrun_core.plan.trace.op_recorder import OpRecorder
from zrun_core.plan.trace.rows import Rows, TracePhase, Vocabulary
from zrun_core.plan.trace.sample_batches import SampleBatches, bytes_of, samples_of, tensors_of
from zrun_core.spine import memory_limits
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.activations import ActivationsConfig
from zrun_core.stages.flow import ModelFlow
from zrun_core.stages.follow import follow
from zrun_core.telemetry.flops import FlopCounter
from zrun_core.user_code import user
from zrun_core.user_code.loss import LossFunction, LossKind, compute_loss
from zrun_core.user_code.on_meta import on_meta
from zrun_core.zero.unit.precision import Precision
from zrun_core.zero.wrap.auto_wrap import repeated_blocks, running_norm_params
from zrun_core.zero.wrap.fakes import FakeMode
from zrun_core.zero.wrap.tiling import tile_linears

_CPU = torch.device("cpu")
_SHARE_OF_HOST = 0.4  # of the memory that is left, for a model that must run for real
_MAX_DEPTH = 3  # of containers in a module's attributes that are searched for tensors


class CannotTraceError(Exception):
    """The model does not run on what it is made of now; the text says why."""


class BuiltModel(NamedTuple):
    """A job's model on one rank.

    Attributes:
        model: with the rank's slices of layers.
        table: by name of a parameter, its part of a tensor of the whole model; none where layers
            are not divided.
    """

    model: nn.Module
    table: Mapping[str, TensorPart]


def build(job: JobConfig, job_dir: Path, device: str, *, for_real: bool = False) -> BuiltModel:
    """Return the job's model as one rank has it, on the meta device if its factory bears that.

    Its layers are divided and tiled as the job asks.

    Args:
        device: type of what trains, "cpu" or "cuda".
        for_real: whether its tensors must have values.

    Raises:
        JobError: there is no such factory, or what it builds cannot be divided or tiled so.
        UserCodeError: it raised.
    """
    model = build_whole(job, job_dir, for_real=for_real)
    table = divide_alone(model, job.parallel, device, for_real=for_real)
    tile_linears(model, job.zero.tile, Precision.of(job.precision).compute, job.zero.leaf)
    return BuiltModel(model, table)


def build_whole(job: JobConfig, job_dir: Path, *, for_real: bool = False) -> nn.Module:
    """Return the job's model as its factory builds it, on the meta device if that bears it.

    Args:
        for_real: whether its tensors must have values.

    Raises:
        JobError: there is no such factory.
        UserCodeError: it raised.
    """
    if not for_real:
        try:
            with on_meta():
                return user.build_model(job.model, job_dir)
        except UserCodeError:
            pass  # it may need values
    torch.manual_seed(job.seed)
    return user.build_model(job.model, job_dir)


class TracedModel:
    """A job's model, its samples, and the passes that run through it.

    Attributes:
        job_dir: against which the job's code is imported.
        model: the module; of neither kind until `make_fake` or `make_real`.
        blocks: its repeated blocks.
        samples: of which batches are made.
        vocabulary: numbers modules and operators, for all passes.
        is_fake: whether tensors have no values.
        follows_values: whether the size of a tensor has depended on values so far.
        seconds_per_sample: that the last pass took.
        counter: of FLOPs, for all passes.
    """

    def __init__(
        self,
        job: JobConfig,
        job_dir: Path,
        model: nn.Module,
        loss: LossFunction | None,
        samples: SampleBatches,
        device: str,
    ) -> None:
        """
        Args:
            loss: of the job; None: the model returns it.
            device: whose kernels count: "cpu" or "cuda".
        """
        self._job = job
        self.job_dir = job_dir
        self._loss = loss
        self._device = device
        self._precision = Precision.of(job.precision)
        self._mode: AbstractContextManager[Any] = nullcontext()
        self._known: list[torch.Tensor] = []  # whose memory is no event
        self.model = model
        self.blocks = repeated_blocks(model)
        self.samples = samples
        self.vocabulary = Vocabulary()
        self.is_fake = False
        self.follows_values = False
        self.seconds_per_sample = 0.0
        self.counter = FlopCounter()

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters in fp32."""
        return 4 * sum(param.numel() for param in self.model.parameters())

    @property
    def has_half_products(self) -> bool:
        """Products run in 16 bits on a CPU, where they take scratch."""
        return self._device == "cpu" and self._precision.compute is not torch.float32

    # What it is made of

    def make_fake(self) -> None:
        """Make parameters, in the compute dtype, buffers and other tensors fake."""
        mode = FakeMode()
        self._mode = mode
        self.is_fake = True

        def made(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            stride = dense_stride(tensor)
            with mode:
                return torch.empty_strided(tensor.shape, stride, dtype=dtype, device=_CPU)

        self._replace_tensors(made)

    def make_real(self) -> None:
        """Build the model again with values, its parameters in the compute dtype.

        Raises:
            UserCodeError: it does not fit here, or its factory raised.
        """
        gc.collect()
        self._mode = nullcontext()
        self.is_fake = False
        params = describe_params(self.model, self._precision.compute)
        num_bytes = 4 * sum(param.numel for param in params)
        if num_bytes > _SHARE_OF_HOST * memory_limits.host_available():
            raise UserCodeError(
                "the model must run for real to be measured, "
                f"and its {num_bytes / 2**30:.1f} GiB do not fit here"
            )
        self.samples = samples_of(self._job, self.job_dir, values=True)
        self.model = build(self._job, self.job_dir, self._device, for_real=True).model
        if not self.model.training:
            self.model.train()
        self.blocks = repeated_blocks(self.model)
        self._replace_tensors(lambda tensor, dtype: tensor.detach().to(dtype))

    def _replace_tensors(self, made: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> None:
        """Replace every tensor by what `made` makes of it in a dtype; a shared one stays shared."""
        in_fp32 = running_norm_params(self.model)
        new: dict[int, torch.Tensor] = {}
        self._known = []

        def replaced(old: torch.Tensor) -> torch.Tensor:
            if id(old) in new:
                return new[id(old)]
            if not isinstance(old, nn.Parameter):
                replacement = made(old.detach(), old.dtype)
            else:
                dtype = torch.float32 if id(old) in in_fp32 else self._precision.compute
                replacement = made(old.detach(), dtype)
                replacement = nn.Parameter(replacement, requires_grad=old.requires_grad)
                replacement.__dict__.update(vars(old))
            new[id(old)] = replacement
            self._known += [old, replacement]  # the old one, so that its id is not used again
            return replacement

        for module in self.model.modules():
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        tensors[key] = replaced(tensor)  # type: ignore[assignment]
        for module in self.model.modules():
            for key, value in list(vars(module).items()):
                if key not in ("_parameters", "_buffers", "_modules"):
                    vars(module)[key] = _with_tensors(value, replaced)

    # Running it

    @contextmanager
    def checkpointed(self, policy: str) -> Iterator[None]:
        """Let blocks recompute as `policy` says; all else is as in training."""
        config = ActivationsConfig(checkpoint=policy, n=self._job.activations.n)  # type: ignore[arg-type]
        with apply_checkpointing(self.model, config) as undo:
            for hook in omit_cache(self.model):
                undo.callback(hook.remove)
            yield

    def run(
        self, micro: int, series: Sequence[BlockSeries], units: int, *, products: bool = False
    ) -> Rows:
        """Return what forward, loss and backward of one micro-batch do.

        Args:
            series: repeated blocks, of which only some run.
            units: of each series that run before its tail.
            products: whether the scratch of matrix products is found out too.

        Raises:
            CannotTraceError: something raised.
            BlocksDifferError: other blocks ran than those that were left.
        """
        recorder = self._recorder(products)
        gc.collect()
        gc.disable()  # cycles are freed when Python thinks fit: not in here
        start = time.monotonic()
        try:
            batch = self._batch(micro)
            positions = _as_unpacked(batch) if self.is_fake else nullcontext()
            with self._mode, positions, shortened(series, units):
                recorder.know(self._known)
                recorder.know(tensors_of(batch))
                with recorder.following():
                    value = self._forward(batch, micro)
                    recorder.phase = TracePhase.BACKWARD
                    value.backward()
                    del value
        except ZrunError as error:
            raise CannotTraceError(last_line(error)) from error
        except Exception as error:
            raise CannotTraceError(f"{type(error).__name__}: {last_line(error)}") from error
        finally:
            gc.enable()
        self.seconds_per_sample = (time.monotonic() - start) / micro
        self.follows_values = self.follows_values or recorder.follows_values
        _check_entered(recorder.entered, series, units)
        return recorder.rows()

    def evaluate(
        self, samples: SampleBatches, micro: int, metrics: Callable[[nn.Module, Any], Any] | None
    ) -> int:
        """Return the most bytes that an evaluation of a micro-batch holds, with the batch.

        Args:
            samples: of the held-out data.
            metrics: of the job; without them the loss is computed.

        Raises:
            CannotTraceError: something raised.
        """
        batch = self._batch(micro, samples)
        ways: list[Callable[[], object]] = [lambda: self._forward(batch, micro)]
        if metrics is not None:
            ways.insert(0, lambda: metrics(self.model, batch))
        return bytes_of(batch) + self.most_held(ways, batch, "evaluation failed")

    def most_held(self, ways: Sequence[Callable[[], object]], batch: Any, failing: str) -> int:
        """Return the most bytes that calls of the model without gradients hold, beside the batch.

        Args:
            ways: each calls the model, in evaluation mode.
            batch: that they are given; None: they make their own.
            failing: what to say of an error.

        Raises:
            CannotTraceError: something raised.
        """
        recorder = self._recorder(products=False)
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            positions = _as_unpacked(batch) if self.is_fake else nullcontext()
            with self._mode, positions, torch.no_grad():
                recorder.know(self._known)
                recorder.know(tensors_of(batch))
                with recorder.following(), user.user_code(failing):
                    for way in ways:
                        with self._precision.autocast(_CPU):
                            way()
        except Exception as error:
            raise CannotTraceError(last_line(error)) from error
        finally:
            for module, training in modes:
                module.training = training
        rows = recorder.rows()
        events = rows[rows["operator"] < 0]
        held = np.cumsum(np.where(events["alloc"], 1, -1) * events["size"][:, 0])
        return round(float(held.max(initial=0.0)))

    def follow(self, micro: int) -> ModelFlow:
        """Return what flows through the model in the forward of one micro-batch.

        Raises:
            JobError: no pipeline can be made of it.
        """
        batch = self._batch(micro)
        positions = _as_unpacked(batch) if self.is_fake else nullcontext()
        with self._mode, positions:
            return follow(
                self.model, lambda: self._forward(batch, micro), self._precision.compute, _CPU
            )

    def _recorder(self, products: bool) -> OpRecorder:
        names = {id(module): name for name, module in self.model.named_modules()}
        block_of = {
            names[id(inner)]: number
            for number, (_, block) in enumerate(self.blocks)
            for inner in block.modules()
        }
        return OpRecorder(
            self.model,
            names,
            block_of,
            self.vocabulary,
            self.counter,
            reduce_dtype=self._precision.reduce,
            probes=self._device == "cpu",
            products=products,
        )

    def _batch(self, micro: int, samples: SampleBatches | None = None) -> Any:
        """Return a micro-batch of the model's own samples, or of others."""
        samples = samples or self.samples
        if not self.is_fake:
            return samples.real_batch(micro)

        def made(tensor: torch.Tensor) -> torch.Tensor:
            stride = tensor.stride()
            return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=_CPU)

        batch = samples.batch(micro)
        with self._mode:
            return map_tensors(made, batch)

    def _forward(self, batch: Any, micro: int) -> torch.Tensor:
        """Return what the trainer differentiates."""
        with self._precision.autocast(_CPU), user.user_code("forward failed"):
            loss = compute_loss(self.model, batch, self._loss, micro)
        weight = float(loss.weight) if loss.kind is LossKind.MEAN else 1.0
        return loss.value * (weight / micro)


def _check_entered(entered: Sequence[int], series: Sequence[BlockSeries], units: int) -> None:
    """Raise `BlocksDifferError` unless the blocks that were left ran, each once."""
    kept = [each.first + place for each in series for place in each.kept(units)]
    in_series = {each.first + place for each in series for place in range(len(each.names))}
    if sorted(block for block in entered if block in in_series) != sorted(kept):
        raise BlocksDifferError


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text, or its name if it has none."""
    lines = str(error).strip().splitlines()
    text = lines[-1] if lines else type(error).__name__
    return text.strip()[:300]


def _with_tensors(
    value: Any, replaced: Callable[[torch.Tensor], torch.Tensor], depth: int = 0
) -> Any:
    """Return `value` with every tensor in it replaced; itself where there is none."""
    if isinstance(value, torch.Tensor):
        return replaced(value)
    if depth > _MAX_DEPTH or not isinstance(value, dict | list | tuple):
        return value
    if hasattr(value, "_fields"):  # a named tuple is not made of a list
        return value
    if isinstance(value, dict):
        for key, item in list(value.items()):
            changed = _with_tensors(item, replaced, depth + 1)
            if changed is not item:
                value[key] = changed
        return value
    items = [_with_tensors(item, replaced, depth + 1) for item in value]
    if all(one is other for one, other in zip(items, value, strict=True)):
        return value
    return type(value)(items)


@contextmanager
def _as_unpacked(batch: Any) -> Iterator[None]:
    """Let transformers take rows for one sequence each, unless `batch` has positions of its own.

    A decoder without a cache looks at the positions of its tokens: several sequences packed into
    one row need a mask. Fake positions cannot tell, and the model makes the mask for nothing. Those
    that the model itself counts up are never packed; those that come with the batch may be.
    """
    name = "find_packed_sequence_indices"
    module = sys.modules.get("transformers.masking_utils")
    function = getattr(module, name, None)
    has_positions = isinstance(batch, Mapping) and "position_ids" in batch
    if function is None or has_positions:
        yield
        return
    setattr(module, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        setattr(module, name, function)
