"""Groups of ranks, and how a message travels from one rank of a group to another.

    ProcessGroupTransport     torch's process groups: gloo's sockets, NCCL's connections
    CmaTransport              the memory of ranks on one host: see `cma_transport.py`

`Comm` chooses one of them for the ranks of a group when they first exchange a message.

[Note: tags]
What travels between two ranks at the same time has different tags. Each unit has two, one for its
gathers and one for its reductions, so that ranks that disagree wait for each other, and the
watchdog says about what, instead of mixing two units of one size.

    1                       short messages, such as the step's
    2                       activations, among ranks that have parts of the same layers
    3, 4, 5, ...            gather and reduction of unit 0, of unit 1, ...
    65280 ... 65535         messages between two ranks, by number: the last that memory has
    65536 ...               units again: a model of 32,000 units has them, and uses sockets there
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist

NUM_TAGS = 1 << 16  # messages with higher ones go through process groups
SMALL_TAG = 1
ACTIVATION_TAG = 2
MESSAGE_TAGS = range(NUM_TAGS - 256, NUM_TAGS)


@dataclass(frozen=True)
class Group:
    """The ranks along one axis of the mesh that this rank belongs to.

    Size 1 is not special: such a group moves nothing.

    Attributes:
        ranks: global ranks, in the group's order.
        index: this rank's place among them.
        process_group: None only where nothing is ever sent.
    """

    axis: str
    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)


class Work(Protocol):
    """A message or a collective in flight: torch's works, and `cma_transport.Message`."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object: ...


class Transport(ABC):
    """Carries messages between the ranks of a group. Those of one pair and tag arrive in order.

    Attributes:
        observes_completion: `Work.is_completed` of a message tells when it is over.
        completes_sends: a send completes without any help of the receiver's thread.
    """

    observes_completion: ClassVar[bool]
    completes_sends: ClassVar[bool]

    @abstractmethod
    def send(self, tensor: torch.Tensor, group: Group, peer: int, tag: int) -> Work:
        """Send a tensor to another rank.

        Args:
            tensor: contiguous; it must not change until the work is over.
            peer: place of the receiver in the group.
            tag: see [Note: tags].
        """

    @abstractmethod
    def receive(self, tensor: torch.Tensor, group: Group, peer: int, tag: int) -> Work:
        """Receive the next message of another rank.

        Args:
            tensor: contiguous, filled when the work is over.
            peer: place of the sender in the group.
            tag: that the sender gives to the message.
        """

    @abstractmethod
    def prepare_to_wait(self, works: Sequence[Work]) -> None:
        """Do what other ranks may need of this thread before it blocks in `works`."""


class ProcessGroupTransport(Transport):
    """Messages through torch's process groups, whose own threads carry them."""

    observes_completion = False  # gloo does not say what has arrived
    completes_sends = True

    def send(self, tensor: torch.Tensor, group: Group, peer: int, tag: int) -> Work:
        assert group.process_group is not None
        return issued(group.process_group.send([as_bytes(tensor)], peer, tag))

    def receive(self, tensor: torch.Tensor, group: Group, peer: int, tag: int) -> Work:
        assert group.process_group is not None
        return issued(group.process_group.recv([as_bytes(tensor)], peer, tag))

    def prepare_to_wait(self, works: Sequence[Work]) -> None:
        pass


def issued(work: dist.Work | None) -> Work:
    """Return the work of an asynchronous call: None would mean that this rank is no member."""
    assert work is not None
    return work


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as uint8: messages need no number format."""
    return tensor.view(-1).view(torch.uint8)


def message_tag(number: int) -> int:
    """Return the tag of a message between two ranks. Equal ones are 256 numbers apart."""
    return MESSAGE_TAGS[number % len(MESSAGE_TAGS)]


def gather_tag(unit_index: int) -> int:
    """Return the tag of a unit's all-gathers."""
    return _unit_tag(2 * unit_index)


def reduce_tag(unit_index: int) -> int:
    """Return the tag of a unit's reductions."""
    return _unit_tag(2 * unit_index + 1)


def _unit_tag(number: int) -> int:
    tag = ACTIVATION_TAG + 1 + number
    if tag < MESSAGE_TAGS.start:
        return tag
    return tag + len(MESSAGE_TAGS)
