"""The random streams of a rank.

The *model's* stream is the process's own: the generators of Python, of numpy if it is in use, of
torch on the CPU and on the rank's GPU. Ranks that differ in their place along `tensor` alone draw
the same from it.

Others take its place for a while, and leave it where it was. *data* is in force while samples are
read and made batches; *inside* in a region where the ranks along `tensor` hold different parts of
one activation; those of *forwards* where all stages of a pipeline must draw alike. Each of them
begins anew whenever it is taken, from a key and a number that is the same the next time: the
position in the data, the micro-batch, or one drawn from the model's stream. So there is nothing
else to remember of them than their keys.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from zrun_core.errors import CheckpointError
from zrun_core.hardware import accelerator

CPU = torch.device("cpu")
_ON_DEVICE = "cuda"  # what checkpoints call the stream of an accelerator
_RANGE = 2**32  # of keys and seeds: torch's CPU generator reads no more of its seed


def mix(seed: int, number: int) -> int:
    """Return one seed for generators, within 32 bits, from two numbers."""
    return (seed * 1_000_003 + number) % _RANGE


def seed(value: int, device: torch.device = CPU) -> None:
    """Begin the stream in force anew; `value` is within 32 bits."""
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value)
    for generator in _generators(device):
        generator.manual_seed(value)


class Streams:
    """The streams of the rank at a place along the axes.

    Attributes:
        data: in force while samples are read and made batches. Each sample begins numbers of its
            own there: see `data.samples.Batches`.
        forwards: of micro-batches, the same at each place along the pipeline and along `tensor`.
        has_drawn_inside: something was drawn within a region.
    """

    def __init__(
        self,
        job_seed: int,
        device: torch.device,
        *,
        dp: int,
        pp: int = 0,
        tp: int = 0,
    ) -> None:
        """Derive the keys of a place.

        Args:
            tp: place along tensor; it changes the stream `inside` only.
        """
        self._device = device
        self.has_drawn_inside = False
        if pp == 0:
            self._seed = mix(job_seed, 1 + dp)  # as runs without a pipeline have always done
        else:
            self._seed = _key("model", job_seed, dp, pp)
        self.data = ScopedStream(_key("data", job_seed, dp), device)
        self.forwards = ForwardStreams(_key("forward", job_seed, dp), device)
        self._inside = _key("inside", job_seed, dp, pp, tp)

    def begin(self) -> None:
        """Begin the model's stream."""
        seed(self._seed, self._device)

    def begin_late(self, step: int) -> None:
        """Begin the model's stream of a rank that a run has from after `step` on only."""
        seed(mix(self._seed, step), self._device)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Draw from the stream of this place along `tensor`: of torch's generators, in a region.

        Python's and numpy's remain those of the model: what they decide, such as whether a layer is
        left out, all ranks of the region must do alike.

        A region that is recomputed in backward draws the same again. `torch.utils.checkpoint` knows
        the default generators only, and cannot say which of several micro-batches it runs again;
        but it sets them back, so the number comes out of them that came before.

        Where nothing is drawn inside, the model's stream stays where it was, as if there were no
        region: ranks along `tensor` draw what one rank does.
        """
        leave = self.enter_inside()
        try:
            yield
        finally:
            leave()

    def enter_inside(self) -> Callable[[], None]:
        """Begin to draw as within `inside`; return what ends it."""
        generators = _generators(self._device)
        untouched = [generator.get_state() for generator in generators]
        number = draw_seed()
        states = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(mix(self._inside, number))
        begun = [generator.get_state() for generator in generators]

        def leave() -> None:
            pairs = zip(generators, begun, strict=True)
            has_drawn = any(not torch.equal(each.get_state(), state) for each, state in pairs)
            self.has_drawn_inside |= has_drawn
            back = states if has_drawn else untouched
            for generator, state in zip(generators, back, strict=True):
                generator.set_state(state)

        return leave

    def capture(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return what `capture` says of the model's stream, and the keys of the others."""
        tensors, numbers = capture(self._device)
        keys = {
            "data": {"key": self.data.key},
            "inside": {"key": self._inside},
            "forward": {"key": self.forwards.key},
        }
        return tensors, {**numbers, **keys}

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Go on with the streams that `capture` saw.

        Checkpoints of earlier versions hold the model's alone: the others keep this job's keys.
        """
        restore(tensors, numbers, self._device)
        if "data" in numbers:
            self.data.key = _checked_key(numbers["data"])
        if "inside" in numbers:
            self._inside = _checked_key(numbers["inside"])
        if "forward" in numbers:
            self.forwards.key = _checked_key(numbers["forward"])


class ScopedStream:
    """A stream that replaces the model's within a `with` block."""

    def __init__(self, key: int, device: torch.device) -> None:
        self.key = key
        self._device = device

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """Draw from this stream, as it begins at `number`; afterwards the model's goes on."""
        with kept_position(self._device):
            self.begin(number)
            yield

    def begin(self, number: int) -> None:
        """Begin it anew at `number`, within `at`."""
        seed(mix(self.key, number), self._device)


class ForwardStreams:
    """The streams of a micro-batch's forward: one for each call of a block, one for the rest.

        model(batch)     of_micro(step, number)   masks, noise, labels: the same on every stage
          block k        of_call(k)               dropout: the same whoever runs the block, and when

    So neither the stage of a block, nor what runs before it on this rank, nor the order in which
    micro-batches take turns changes what is drawn.
    """

    def __init__(self, key: int, device: torch.device) -> None:
        self.key = key
        self._device = device
        self._seed = key  # of the micro-batch

    @contextmanager
    def of_micro(self, step: int, number: int) -> Iterator[None]:
        """Draw what a forward draws outside of its blocks; afterwards the model's stream goes on.

        Args:
            step: that the micro-batch belongs to, from 1; 0: to an evaluation.
        """
        with self._from(_key("micro", self.key, step, number)):
            yield

    @contextmanager
    def apart(self, number: int) -> Iterator[None]:
        """Let equal micro-batches inside draw apart from those within another number.

        Args:
            number: 0 changes nothing.
        """
        before = self.key
        if number:
            self.key = _key("apart", before, number)
        try:
            yield
        finally:
            self.key = before

    @contextmanager
    def of_hook(self, step: int, number: int) -> Iterator[None]:
        """Draw what a hook draws that calls the model; afterwards the model's stream goes on.

        Args:
            step: that the hook is called after.
            number: of such a part of the hook.
        """
        with self._from(_key("hook", self.key, step, number)):
            yield

    @contextmanager
    def _from(self, begin: int) -> Iterator[None]:
        self._seed = begin
        with kept_position(self._device):
            seed(begin, self._device)
            yield

    @contextmanager
    def of_call(self, number: int) -> Iterator[None]:
        """Draw what call `number` of a block draws; afterwards the micro-batch's stream goes on."""
        with kept_position(self._device):
            seed(mix(self._seed, 1 + number), self._device)
            yield


class TurnStream:
    """A stream that takes turns with others, and goes on where its last turn left it."""

    def __init__(self, device: torch.device) -> None:
        """Make one that begins with a number drawn from the stream in force."""
        self._device = device
        self._first = draw_seed()
        self._position: _Position | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Draw from this stream; afterwards the one before goes on."""
        before = _Position.now(self._device)
        try:
            if self._position is None:
                seed(self._first, self._device)
            else:
                self._position.return_to()
            yield
        finally:
            self._position = _Position.now(self._device)
            before.return_to()


@dataclass(frozen=True)
class _Position:
    """State of the generators of a rank: what they will draw next."""

    python: Any
    numpy: Any  # None where numpy is not in use
    of_torch: Sequence[tuple[torch.Generator, torch.Tensor]]

    @classmethod
    def now(cls, device: torch.device) -> _Position:
        numpy = sys.modules.get("numpy")
        return cls(
            random.getstate(),
            None if numpy is None else numpy.random.get_state(),
            [(generator, generator.get_state()) for generator in _generators(device)],
        )

    def return_to(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        for generator, state in self.of_torch:
            generator.set_state(state)


@contextmanager
def kept_position(device: torch.device) -> Iterator[None]:
    """Leave the stream in force where it is, whatever is drawn inside."""
    before = _Position.now(device)
    try:
        yield
    finally:
        before.return_to()


def draw_seed() -> int:
    """Return a seed, drawn from the stream in force."""
    return int(torch.empty((), dtype=torch.int64, device=CPU).random_(_RANGE))


@contextmanager
def fork_torch_rng(device: torch.device) -> Iterator[list[torch.Generator]]:
    """Restore the state of torch's generators on exit, whatever was drawn from them."""
    generators = _generators(device)
    states = [generator.get_state() for generator in generators]
    try:
        yield generators
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def capture(device: torch.device) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the model's stream by generator: (1-D tensors on the CPU, small JSON values)."""
    version, words, gauss = random.getstate()
    tensors = {"python": torch.tensor(words, dtype=torch.int64), "torch": torch.get_rng_state()}
    numbers: dict[str, Any] = {"python": {"version": version, "gauss": gauss}}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        tensors["numpy"] = torch.from_numpy(keys.astype("int64"))
        numbers["numpy"] = {
            "kind": kind,
            "position": position,
            "has_gauss": has_gauss,
            "cached": cached,
        }
    if accelerator.is_accelerator(device):
        tensors[_ON_DEVICE] = accelerator.default_generator(device).get_state()
    return tensors, numbers


def restore(
    tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any], device: torch.device
) -> None:
    """Go on with the streams that `capture` saw. Others stay as they are.

    Args:
        tensors: by generator, as `capture` returned them.
        numbers: by generator, as `capture` returned them.
        device: of this rank, which may have no generator of some.
    """
    _set(tensors, numbers, random, torch.default_generator, lambda numpy: numpy.random)
    if _ON_DEVICE in tensors and accelerator.is_accelerator(device):
        accelerator.default_generator(device).set_state(tensors[_ON_DEVICE])


def check(
    tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any], device: torch.device
) -> None:
    """Make sure that `restore` can go on with these streams, on generators that nothing draws from.

    Args:
        tensors: by generator, as `capture` returned them.
        numbers: by generator, as `capture` returned them.

    Raises:
        CheckpointError: it cannot.
    """
    try:
        _set(
            tensors,
            numbers,
            random.Random(),
            torch.Generator(),
            lambda numpy: numpy.random.RandomState(),
        )
        if _ON_DEVICE in tensors and accelerator.is_accelerator(device):
            torch.Generator(device).set_state(tensors[_ON_DEVICE])
        for name in ("data", "inside", "forward"):
            if name in numbers:
                _checked_key(numbers[name])
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"no random stream can go on from it: {type(error).__name__}: {reason}"
        ) from None


def _set(
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Any],
    python: Any,
    cpu: torch.Generator,
    numpy_stream: Callable[[Any], Any],
) -> None:
    own = numbers["python"]
    gauss = own["gauss"]
    if gauss is not None:
        gauss = float(gauss)
    python.setstate((own["version"], tuple(tensors["python"].tolist()), gauss))
    cpu.set_state(tensors["torch"])
    if "numpy" in tensors:
        import numpy

        own = numbers["numpy"]
        keys = tensors["numpy"].numpy().astype("uint32")
        if not 0 <= own["position"] <= len(keys):  # numpy would read beyond them
            raise ValueError(f"position {own['position']}")
        state = (own["kind"], keys, own["position"], int(own["has_gauss"]), float(own["cached"]))
        numpy_stream(numpy).set_state(state)


def _key(name: str, *numbers: int) -> int:
    """Return the key, or the seed, of the stream `name` at a place of a job."""
    return xxhash.xxh32_intdigest(f"{name} {' '.join(map(str, numbers))}".encode())


def _checked_key(own: Mapping[str, Any]) -> int:
    """Return the key that a checkpoint holds.

    Raises:
        LookupError, TypeError, ValueError: it holds none.
    """
    key = own["key"]
    if type(key) is not int or not 0 <= key < _RANGE:
        raise ValueError(f"key {str(key)[:40]!r}")
    return key


def _generators(device: torch.device) -> list[torch.Generator]:
    """Return those of torch from which the model of a rank draws."""
    if not accelerator.is_accelerator(device):
        return [torch.default_generator]
    return [torch.default_generator, accelerator.default_generator(device)]
