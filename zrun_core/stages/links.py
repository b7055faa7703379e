"""Messages between the stages of a pipeline: activations go on, their gradients come back.

    stage 0   F0 -> F1 -> F2 ->      <- B0       activations on `mesh.pipe`
    stage 1      -> F0 -> B0 -> F1 ...           gradients on `mesh.pipe_back`

Where the last stage has a chunk before one of the first, what crosses that border goes the other
way, on `mesh.pipe_wrap` and `mesh.pipe_back_wrap`: see [Note: a process group for each direction]
in `distributed/mesh.py`.

Nobody waits for a message that it has sent before the step ends: its tensor is held until then, or
until it is found to be over. A message has a number that both ends know: that of its micro-batch,
of the border that it crosses, and of its place among those that cross it.
"""

from __future__ import annotations

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.handle import Handle
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.transport import Group
from zrun_core.hardware.clock import Waits
from zrun_core.pipeline.messages import carrier
from zrun_core.pipeline.split import Split


class StageLinks:
    """The messages of one stage.

    Attributes:
        device: where tensors are received.
        waits: of the device for what other stages send, until somebody takes them.
    """

    def __init__(self, comm: Comm, mesh: Mesh, split: Split, most_crossing: int) -> None:
        self.device = comm.device
        self.waits = Waits(comm.device)
        self._comm = comm
        self._mesh = mesh
        self._split = split
        self._most_crossing = most_crossing
        self._sent: list[tuple[Handle, torch.Tensor]] = []  # which may still be read

    def send_activation(self, tensor: torch.Tensor, chunk: int, micro: int, place: int) -> None:
        """Send a tensor to the chunk after `chunk`.

        Args:
            place: of the tensor among those that cross.
        """
        peer = self._split.stage_of(chunk + 1)
        group = self._carrier(chunk + 1, is_grad=False)
        name = f"activations of micro-batch {micro}"
        number = self._number(chunk + 1, micro, place, is_grad=False)
        self._send(tensor, peer, group, number, name)

    def receive_activation(
        self, like: torch.Tensor, chunk: int, micro: int, place: int
    ) -> torch.Tensor:
        """Receive a tensor from the chunk before `chunk`.

        Args:
            like: has its shape and dtype.
            place: of the tensor among those that cross.
        """
        peer = self._split.stage_of(chunk - 1)
        group = self._carrier(chunk, is_grad=False)
        name = f"activations of micro-batch {micro}"
        number = self._number(chunk, micro, place, is_grad=False)
        return self._receive(like.shape, like.dtype, peer, group, number, name)

    def send_grad(self, grad: torch.Tensor, chunk: int, micro: int, place: int) -> None:
        """Send the gradient of what `receive_activation` of the same arguments has returned."""
        peer = self._split.stage_of(chunk - 1)
        group = self._carrier(chunk, is_grad=True)
        number = self._number(chunk, micro, place, is_grad=True)
        self._send(grad, peer, group, number, f"gradients of micro-batch {micro}")

    def receive_grad(
        self, shape: torch.Size, dtype: torch.dtype, chunk: int, micro: int, place: int
    ) -> torch.Tensor:
        """Receive the gradient of what `send_activation` has sent.

        Args:
            chunk, micro, place: as of `send_activation`.
        """
        peer = self._split.stage_of(chunk + 1)
        group = self._carrier(chunk + 1, is_grad=True)
        name = f"gradients of micro-batch {micro}"
        number = self._number(chunk + 1, micro, place, is_grad=True)
        return self._receive(shape, dtype, peer, group, number, name)

    def forget_what_is_over(self) -> None:
        """Let go of tensors that others have read, as far as can be told without waiting."""
        self._sent = [each for each in self._sent if not each[0].poll()]

    def flush(self) -> None:
        """Wait until others have read all that was sent. Each of them has asked for it by then."""
        for handle, _ in self._sent:
            handle.wait()
        self._sent = []

    def _carrier(self, chunk: int, *, is_grad: bool) -> Group:
        """Return the group that carries what crosses the border before `chunk`, or its gradient."""
        group: Group = getattr(self._mesh, carrier(self._split.pp, chunk, is_grad=is_grad))
        return group

    def _number(self, chunk: int, micro: int, place: int, *, is_grad: bool) -> int:
        """Return the number of a message about what crosses the border before `chunk`."""
        of_border = micro * self._split.num_chunks + chunk
        return 2 * (self._most_crossing * of_border + place) + int(is_grad)

    def _send(self, tensor: torch.Tensor, peer: int, group: Group, number: int, name: str) -> None:
        self.forget_what_is_over()
        sent = tensor.contiguous()
        handle = self._comm.send(sent, peer, group, number=number, name=name)
        self._sent.append((handle, sent))

    def _receive(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        peer: int,
        group: Group,
        number: int,
        name: str,
    ) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._comm.device)
        handle = self._comm.receive(tensor, peer, group, number=number, name=name)
        with self.waits.counting():
            handle.wait()
        return tensor
