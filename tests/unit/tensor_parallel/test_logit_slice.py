"""Logits as a slice, on one rank: memory, what is refused, and what else touches a tensor."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.transport import Group
from zrun_core.errors import JobError, UserCodeError
from zrun_core.models.token_loss import token_loss
from zrun_core.tensor_parallel.logit_slice import LogitSlice, logit_slice
from zrun_core.tensor_parallel.tensor_comm import TensorComm
from zrun_core.tensor_parallel.vocabulary import Vocabulary
from zrun_core.tensor_parallel.vocabulary_layers import divide_embedding, embed

N, V = 24, 50


def vocabulary(size: int = V) -> Vocabulary:
    group = Group("tensor", (0,), 0, None)
    return Vocabulary(size, TensorComm(Comm(torch.device("cpu")), group), "lm_head")


def example(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, V).to(dtype).requires_grad_(), torch.randint(V, (N,))


def as_slice(numbers: Tensor) -> LogitSlice:
    """Logits that own their memory, as a head computes them."""
    return logit_slice(numbers * 1, vocabulary(numbers.shape[-1]))


class Head(nn.Linear):
    """A head whose logits are a slice."""

    def forward(self, x: Tensor) -> Tensor:
        return logit_slice(super().forward(x), vocabulary())


# Formats


@pytest.mark.parametrize("upcast", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_formats_are_those_of_torch(dtype: torch.dtype, autocast: bool, upcast: bool) -> None:
    numbers, labels = example(dtype)
    losses, grads = [], []
    for make in (as_slice, lambda numbers: numbers * 1):
        logits = make(numbers)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(logits.float() if upcast else logits, labels)
        (numbers.grad,) = torch.autograd.grad(loss, numbers)
        losses.append(loss.detach())
        grads.append(numbers.grad)
    assert losses[0].dtype == losses[1].dtype
    assert grads[0].dtype == dtype
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if dtype is not torch.float32 else {}
    torch.testing.assert_close(*losses, **tolerance)
    torch.testing.assert_close(*grads, **tolerance)
    if upcast:
        reference = F.cross_entropy(numbers.detach().float(), labels)
        torch.testing.assert_close(losses[0].float(), reference, rtol=1e-6, atol=0)


def test_a_cast_to_fp32_takes_no_memory_until_it_is_computed_with() -> None:
    logits = as_slice(example(torch.bfloat16)[0])
    wide = logits.float().view(2, -1, V)
    assert wide.dtype == torch.float32
    assert wide.slice().local.dtype == torch.bfloat16
    assert (wide * 2).slice().local.dtype == torch.float32
    assert torch.equal(wide.whole(), logits.whole().float().view(2, -1, V))


class Exponentials(TorchDispatchMode):
    """Counts them: one for each chunk of positions."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.exp_.default
        return func(*args, **(kwargs or {}))


def test_chunks_are_those_of_the_device_that_is_planned() -> None:
    """A plan for GPUs is traced on the CPU, and its chunks must not be those of a CPU's cache."""
    found = {}
    for device in ("cpu", "cuda"):
        comm = SimpleNamespace(device=torch.device(device))
        planned = Vocabulary(512, TensorComm(comm, Group("tensor", (0,), 0, None)), "lm_head")
        logits = logit_slice(torch.randn(4096, 512), planned)
        with Exponentials() as mode:
            F.cross_entropy(logits, torch.zeros(4096, dtype=torch.long))
        found[device] = mode.count
    assert found == {"cpu": 2, "cuda": 1}


# Memory


def written_over(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each backward of a loss took the memory of its logits."""
    from zrun_core.tensor_parallel import cross_entropy

    found: list[bool] = []
    is_ours = cross_entropy._is_ours

    def spy(*args: Any) -> bool:
        found.append(is_ours(*args))
        return found[-1]

    monkeypatch.setattr(cross_entropy, "_is_ours", spy)
    return found


def test_the_gradient_takes_the_place_of_logits_that_nobody_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = written_over(monkeypatch)
    numbers, labels = example()
    expected = torch.autograd.grad(F.cross_entropy(numbers, labels), numbers)[0]

    def loss_of(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().view(-1, V), labels)

    def grad(loss: Tensor, **options: Any) -> None:
        torch.testing.assert_close(torch.autograd.grad(loss, numbers, **options)[0], expected)

    grad(loss_of(as_slice(numbers)))
    grad(checkpoint(lambda x: loss_of(as_slice(x)), numbers, use_reentrant=False))
    assert found == [True, True]

    for hold in (lambda x: x, lambda x: x[3:], lambda x: x.detach(), lambda x: x.local()):
        logits = as_slice(numbers)
        before = logits.whole().detach().clone()
        loss = loss_of(logits)
        held = hold(logits)
        del logits
        grad(loss)
        kept = held.whole() if isinstance(held, LogitSlice) else held
        assert torch.equal(kept, before[-len(kept) :])
    assert found[2:] == [False] * 4

    loss = loss_of(as_slice(numbers))
    grad(loss, retain_graph=True)
    grad(loss)
    assert found[6:] == [False, True]


# Changes in place


def test_views_of_what_changes_in_place_are_refused() -> None:
    numbers, _ = example()
    for change in (
        lambda logits: logits.view(2, -1, V).mul_(2.0),
        lambda logits: logits[:, :3].zero_(),
        lambda logits: logits[:, 3].fill_(1.0),
        lambda logits: logits.T.add_(1.0),
    ):
        logits = as_slice(numbers).detach()
        change(logits)
        with pytest.raises(
            UserCodeError, match=r"lm_head: these logits .* changed in place .* out"
        ):
            logits.sum()
    logits = as_slice(numbers).detach()
    flat = logits.view(-1)
    logits.mul_(2.0)
    torch.testing.assert_close(logits.whole(), numbers.detach() * 2)
    cast = as_slice(numbers.detach().bfloat16())
    wide = cast.float()
    cast.zero_()
    assert wide.whole().any(), "a cast is a copy"
    with torch.inference_mode():
        logits = as_slice(numbers.detach())
        logits[:, 2] = 7.0
        logits[logits > 1].sum()
        assert (logits[:, 2] == 7.0).all()
    assert flat.dim() == 1


# Others' functions


def test_it_prints_copies_and_pickles() -> None:
    numbers, _ = example()
    logits = as_slice(numbers)
    words = f"LogitSlice(shape=[{N}, {V}], dtype=torch.float32, entries 0 to {V - 1} are here: "
    assert repr(logits).startswith(words)
    assert f"{logits}".startswith(words)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(logits)
    twin = copy.deepcopy(logits.detach())
    assert type(twin) is LogitSlice
    assert torch.equal(twin.whole(), numbers)
    loaded = pickle.loads(pickle.dumps(logits.detach()))
    assert type(loaded) is Tensor
    assert torch.equal(loaded, numbers)
    assert logits.tolist() == numbers.tolist()
    assert logits.detach().numpy().shape == (N, V)
    with pytest.raises(RuntimeError, match="requires grad"):
        logits.numpy()


def test_hooks_and_gradients_of_logits() -> None:
    numbers, labels = example()
    logits = as_slice(numbers)
    seen: list[Tensor] = []
    logits.register_hook(seen.append)
    logits.retain_grad()
    F.cross_entropy(logits, labels).backward()
    assert seen[0].shape == logits.shape
    torch.testing.assert_close(logits.grad.whole(), numbers.grad)
    torch.testing.assert_close(seen[0].whole(), numbers.grad)
    head = Head(4, V)
    calls: list[Any] = []
    head.register_full_backward_hook(lambda *each: calls.append(each))
    F.cross_entropy(head(torch.randn(N, 4, requires_grad=True)), labels).backward()
    assert len(calls) == 1


def test_recomputation_that_hands_out_logits() -> None:
    numbers, labels = example()
    expected = torch.autograd.grad(F.cross_entropy(numbers, labels), numbers)[0]
    for reentrant in (True, False):
        logits = checkpoint(as_slice, numbers, use_reentrant=reentrant)
        assert type(logits) is LogitSlice
        numbers.grad = None
        F.cross_entropy(logits, labels).backward()
        torch.testing.assert_close(numbers.grad, expected)


def test_fake_logits_are_traced_as_real_ones() -> None:
    with FakeTensorMode():
        numbers = torch.empty(N, V, requires_grad=True)
        loss = F.cross_entropy(as_slice(numbers).float(), torch.empty(N, dtype=torch.int64))
        (loss + as_slice(numbers).softmax(-1).sum()).backward()
        assert loss.shape == ()
        assert numbers.grad.shape == (N, V)


def test_no_position_counts() -> None:
    numbers, labels = example()
    none = labels < 0
    for make in (as_slice, torch.clone):
        assert F.cross_entropy(make(numbers)[none], labels[none]).isnan()
        assert F.cross_entropy(make(numbers)[none], labels[none], reduction="sum") == 0.0
        assert F.cross_entropy(make(numbers), torch.full_like(labels, -100)).isnan()


def peak(loss_of: Callable[[], Tensor]) -> int:
    """The most bytes that a forward and its backward allocate, by torch's own count."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        loss_of().backward()
    assert found.profiler is not None
    now = most = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def test_memory_of_a_large_vocabulary() -> None:
    """Less than a quarter of what torch takes, with bf16 logits or with a loss in chunks."""
    num_tokens, size = 256, 128_256
    hidden = torch.randn(1, num_tokens, 4)
    labels = torch.randint(size, (1, num_tokens))
    head = nn.Linear(4, size, bias=False).bfloat16()
    hidden = hidden.bfloat16()

    def plain() -> Tensor:
        return F.cross_entropy(head(hidden).float().view(-1, size), labels.view(-1))

    def sliced() -> Tensor:
        logits = logit_slice(head(hidden), vocabulary(size))
        return F.cross_entropy(logits.float().view(-1, size), labels.view(-1))

    def in_chunks() -> Tensor:
        return token_loss(hidden, labels, head, num_tokens // 8)

    bound = peak(plain) / 4
    logits = 2 * num_tokens * size
    assert peak(plain) >= 10 * num_tokens * size
    assert logits <= peak(sliced) < bound
    assert peak(in_chunks) < bound


# Mistakes


def test_a_shape_that_would_change_in_place() -> None:
    logits = as_slice(example()[0]).detach()
    with pytest.raises(UserCodeError, match=r"lm_head: the shape .* from \[24, 50\] to \[1, 24"):
        logits.unsqueeze_(0)


def test_a_gradient_of_the_gradient() -> None:
    numbers, labels = example()
    loss = F.cross_entropy(as_slice(numbers), labels)
    (grad,) = torch.autograd.grad(loss, numbers, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.sum().backward()


@pytest.mark.parametrize("label", [-1, V, -101])
def test_a_label_outside_of_the_vocabulary(label: int) -> None:
    numbers, labels = example()
    labels[3] = label
    words = f"lm_head: an id is none of the vocabulary's, 0 to {V - 1}"
    with pytest.raises(RuntimeError, match=words):
        F.cross_entropy(as_slice(numbers), labels)
    with pytest.raises(RuntimeError, match=words):
        embed(labels, torch.zeros(V, 3), vocabulary())


def test_shapes_that_do_not_fit_are_refused_by_torch() -> None:
    numbers, labels = example()
    logits = as_slice(numbers)
    with pytest.raises(ValueError, match=r"Expected input batch_size \(24\)"):
        F.cross_entropy(logits, labels[1:])
    with pytest.raises(RuntimeError, match=r"must match the size of tensor b \(7\)"):
        logits + torch.ones(7)
    with pytest.raises(RuntimeError, match="weight tensor should be defined either for all 50"):
        F.cross_entropy(logits, labels, weight=torch.ones(7))


@pytest.mark.parametrize(
    ("option", "value"), [("max_norm", 1.0), ("scale_grad_by_freq", True), ("sparse", True)]
)
def test_embeddings_that_cannot_be_divided(option: str, value: Any) -> None:
    module = nn.Embedding(V, 3, **{option: value})
    with pytest.raises(JobError, match=rf"lm_head has {option}={value}, which .* parallel.tp: 1"):
        divide_embedding(module, vocabulary())


class Mixed(nn.Embedding):
    """Also multiplies with its weight, as soft tokens do."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + F.one_hot(ids, V).float() @ self.weight


def test_an_embedding_that_uses_its_weight_otherwise() -> None:
    module = Mixed(V, 3)
    divide_embedding(module, vocabulary())
    with pytest.raises(JobError, match="the forward of lm_head uses its weight for matmul"):
        module(example()[1])
