"""Messages between the stages of a pipeline: which action sends which, and what carries them.

    stage 0   F0 -- F0.0 -->        B0 <-- B1.0 --
    stage 1      F1                 B1

`check_messages` proves that the lists of all stages come through where messages have no tags, as on
NCCL. `check_together` in `actions.py` does so where they have, as on gloo.

[Note: messages without tags]
A message of NCCL is a kernel at each of its ends, on the stream of a communicator, and is over when
both run. A communicator belongs to two ranks of one process group, and has one stream, whichever
way its messages go. So a message blocks those behind it on both ranks, and the next one that is
received is the next one that was sent, whatever it is about. Each kernel also waits for what its
rank has computed before it; a receive keeps the rank from computing until it is over, a send does
not.

Two ranks that both send first through one communicator wait for ever (pytorch/pytorch#172668,
NVIDIA/nccl#479). Small messages may come through by chance: NCCL's buffers take them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from zrun_core.pipeline.actions import Action, ActionKind

PIPE = "pipe"  # axis of the mesh: the stages of a pipeline


class Message(NamedTuple):
    """What crosses a border between two chunks.

    Attributes:
        is_grad: it is the gradient of what has crossed the border.
        chunk: behind the border.
        micro: number of the micro-batch.
        sender, receiver: stages.
    """

    is_grad: bool
    chunk: int
    micro: int
    sender: int
    receiver: int

    def __str__(self) -> str:
        what = "gradient" if self.is_grad else "activations"
        return f"{what} of micro-batch {self.micro} before chunk {self.chunk}"


def received(action: Action, stages: int, last_chunk: int) -> Message | None:
    """Return the message that an action begins with.

    Args:
        stages: of the pipeline; chunk c is on stage c % stages.
        last_chunk: number of the chunk whose forward ends in the loss.
    """
    kind, chunk, micro = action
    if kind is ActionKind.FORWARD and chunk > 0:
        return Message(False, chunk, micro, (chunk - 1) % stages, chunk % stages)
    if kind is ActionKind.BACKWARD and chunk < last_chunk:
        return Message(True, chunk + 1, micro, (chunk + 1) % stages, chunk % stages)
    return None


def sent(action: Action, stages: int, last_chunk: int) -> Message | None:
    """Return the message that an action ends with; arguments as of `received`."""
    kind, chunk, micro = action
    if kind is ActionKind.FORWARD and chunk < last_chunk:
        return Message(False, chunk + 1, micro, chunk % stages, (chunk + 1) % stages)
    if kind is ActionKind.BACKWARD and chunk > 0:
        return Message(True, chunk, micro, chunk % stages, (chunk - 1) % stages)
    return None


def carrier(stages: int, chunk: int, *, is_grad: bool) -> str:
    """Return which group of `distributed.mesh.Mesh` carries what crosses a border.

    Where the last stage sends to the first and there are two, the same two ranks also exchange what
    goes the other way: each way has a group. In longer pipelines no other message goes between
    these two.

    Args:
        is_grad: it is a gradient, which goes back over it.
    """
    axis = "pipe_back" if is_grad else "pipe"
    wraps = stages == 2 and chunk % stages == 0
    return f"{axis}_wrap" if wraps else axis


Communicator = Callable[[Message], Hashable]


def communicators(stages: int) -> Communicator:
    """Return what tells the communicator of a message: its group, and its two ranks."""

    def of(message: Message) -> Hashable:
        ends = sorted((message.sender, message.receiver))
        return (carrier(stages, message.chunk, is_grad=message.is_grad), *ends)

    return of


class _Kernel(NamedTuple):
    """One end of a message.

    Attributes:
        after: computations of this rank that it waits for.
    """

    message: Message
    after: int


class _Computation(NamedTuple):
    """An action.

    Attributes:
        after: the communicator of the last message that it waits for, and how many of it are to be
            over.
    """

    action: Action
    after: tuple[Hashable, int] | None


class _Rank:
    """What the host of a stage queues, and how far its device is."""

    def __init__(self, order: Sequence[Action], stages: int, last: int, of: Communicator) -> None:
        self.computations: list[_Computation] = []
        self.kernels: dict[Hashable, list[_Kernel]] = defaultdict(list)
        self.computed = 0
        self.over: dict[Hashable, int] = defaultdict(int)
        for action in order:
            message = received(action, stages, last)
            after = None
            if message is not None:
                self._queue(of(message), message)
                after = of(message), len(self.kernels[of(message)])
            self.computations.append(_Computation(action, after))
            message = sent(action, stages, last)
            if message is not None:
                self._queue(of(message), message)

    def _queue(self, communicator: Hashable, message: Message) -> None:
        self.kernels[communicator].append(_Kernel(message, len(self.computations)))

    def compute(self) -> bool:
        """Compute as far as possible; return whether anything was."""
        before = self.computed
        while self.computed < len(self.computations):
            after = self.computations[self.computed].after
            if after is not None and self.over[after[0]] < after[1]:
                break
            self.computed += 1
        return self.computed > before

    def running(self, communicator: Hashable) -> Message | None:
        """Return the message of which this rank's end runs on a communicator."""
        kernels = self.kernels.get(communicator, [])
        at = self.over[communicator]
        if at == len(kernels) or self.computed < kernels[at].after:
            return None
        return kernels[at].message

    def left(self) -> Iterator[str]:
        """Yield what has not come through."""
        for communicator, kernels in self.kernels.items():
            if self.over[communicator] < len(kernels):
                yield str(kernels[self.over[communicator]].message)


def check_messages(
    orders: Sequence[Sequence[Action]], communicator: Communicator | None = None
) -> None:
    """Prove that stages come through with their lists where messages have no tags.

    See [Note: messages without tags].

    Args:
        orders: the list of each stage, as `check_together` accepts them.
        communicator: tells that of a message; None: as the runtime has them.

    Raises:
        ValueError: stages wait for each other, or one receives another message than it expects.
    """
    stages = len(orders)
    of = communicators(stages) if communicator is None else communicator
    last = max((action.chunk for order in orders for action in order), default=0)
    ranks = [_Rank(order, stages, last, of) for order in orders]
    moved = True
    while moved:
        moved = any([rank.compute() for rank in ranks])
        for stage, rank in enumerate(ranks):
            for each in rank.kernels:
                message = rank.running(each)
                if message is None or message.sender != stage:
                    continue
                other = ranks[message.receiver]
                expected = other.running(each)
                if expected is None or expected.receiver != message.receiver:
                    continue
                if expected != message:
                    raise ValueError(
                        f"stage {message.receiver} expects {expected}, and stage {stage} sends "
                        f"{message}"
                    )
                rank.over[each] += 1
                other.over[each] += 1
                moved = True
    stuck = [f"stage {stage} at {next(rank.left(), None)}" for stage, rank in enumerate(ranks)]
    if any(True for rank in ranks for _ in rank.left()):
        raise ValueError(f"the stages wait for each other: {', '.join(stuck)}")
