"""A vocabulary over ranks: embeddings, logits and their loss, against torch on whole ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import optim_config, world

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.memory.state_policy import ZeroPolicy
from zrun_core.memory.tensors import full_part, sliced_part
from zrun_core.optim.resolve import resolve_optimizer
from zrun_core.spine.parallel_dims import Coordinates, ParallelDims
from zrun_core.spine.sections.precision import PrecisionConfig
from zrun_core.tensor_parallel.logit_slice import LogitSlice, logit_slice
from zrun_core.tensor_parallel.tensor_comm import TensorComm
from zrun_core.tensor_parallel.vocabulary import Vocabulary
from zrun_core.tensor_parallel.vocabulary_layers import divide_embedding, divide_head
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.precision import Precision
from zrun_core.zero.wrap.sharding_config import ShardingConfig

Ranks = Callable[[int], Any]
B, T, D = 2, 6, 8


class Traffic:
    """What this rank has sent over the axis: messages, and bytes."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def take(self) -> tuple[int, int]:
        calls = sum(self._comm.calls.values())
        self._comm.calls.clear()
        return calls, sum(self._comm.drain().values())


def start(size: int, name: str = "head") -> tuple[Vocabulary, Traffic]:
    rank, num_ranks = world()
    comm = Comm(torch.device("cpu"))
    places = [Coordinates(tp=number) for number in range(num_ranks)]
    mesh = Mesh.build(rank, ["here"] * num_ranks, 1, places=places)
    comm.use_cma(mesh.host, 30.0)
    comm.drain()
    comm.calls.clear()
    return Vocabulary(size, TensorComm(comm, mesh.tensor), name), Traffic(comm)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def labels(size: int) -> Tensor:
    found = torch.randint(size, (B, T), generator=torch.Generator().manual_seed(1))
    found[0, :2] = size - 1  # of the last rank that has any
    found[1, 3] = -100
    return found


# What stays a slice, and what needs the whole: each a function of logits [B, T, V] and labels.

Use = Callable[[Tensor, Tensor], Tensor]


def weights(logits: Tensor) -> Tensor:
    return torch.linspace(0.5, 2.0, logits.shape[-1])


def capped(logits: Tensor) -> Tensor:
    return torch.tanh(logits / 3.0) * 3.0


def in_place(logits: Tensor) -> Tensor:
    logits = logits * 1.0
    logits /= 0.7
    return logits.add_(torch.arange(logits.shape[-1]) * 0.01)


SLICED: dict[str, Use] = {
    "flat": lambda x, y: F.cross_entropy(x.view(-1, x.size(-1)), y.view(-1)),
    "module": lambda x, y: nn.CrossEntropyLoss()(x.flatten(0, 1), y.flatten()),
    "double": lambda x, y: F.cross_entropy(x.double().flatten(0, 1), y.flatten()).float(),
    "shifted": lambda x, y: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, x.shape[-1]), y[..., 1:].contiguous().view(-1)
    ),
    "not contiguous": lambda x, y: F.cross_entropy(
        x[:, 1:].reshape(-1, x.shape[-1]), y[:, 1:].reshape(-1)
    ),
    "last": lambda x, y: F.cross_entropy(x[:, -1], y[:, -1]),
    "one": lambda x, y: F.cross_entropy(x[0, 0], y[0, 0]),
    "classes second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "laid out anew": lambda x, y: F.cross_entropy(x.permute(0, 2, 1).contiguous(), y),
    "sum": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum"),
    "none": lambda x, y: F.cross_entropy(x.mT, y, reduction="none").square().sum(),
    "ignored": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), y.flatten().clamp_min(0), ignore_index=3
    ),
    "weight": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), weights(x)),
    "weight none": lambda x, y: (
        F.cross_entropy(x.mT, y, weights(x), reduction="none").square().sum()
    ),
    "smoothing": lambda x, y: F.cross_entropy(x.mT, y, label_smoothing=0.1),
    "smoothing sum": lambda x, y: F.cross_entropy(x.mT, y, reduction="sum", label_smoothing=0.3),
    "both": lambda x, y: F.cross_entropy(x.mT, y, weights(x), label_smoothing=0.1),
    "soft cap": lambda x, y: F.cross_entropy(capped(x).flatten(0, 1), y.flatten()),
    "per position": lambda x, y: F.cross_entropy((x * randn(B, T, 1)).flatten(0, 1), y.flatten()),
    "plus a bias": lambda x, y: F.cross_entropy((x + weights(x)).flatten(0, 1), y.flatten()),
    "in place": lambda x, y: F.cross_entropy(in_place(x).flatten(0, 1), y.flatten()),
    "mask": lambda x, y: F.cross_entropy(x[y >= 0], y[y >= 0]),
    "places": lambda x, y: F.cross_entropy(x[torch.arange(B), [1, 4]], y[torch.arange(B), [1, 4]]),
    "chunks": lambda x, y: sum(
        F.cross_entropy(a.flatten(0, 1), b.flatten())
        for a, b in zip(x.chunk(2, 1), y.chunk(2, 1), strict=True)
    ),
    "unbound": lambda x, y: sum(map(F.cross_entropy, x.unbind(0), y)),
    "twice": lambda x, y: (
        F.cross_entropy(x[0], y[0]) + F.cross_entropy((2 * x).flatten(0, 1), y.flatten())
    ),
    "joined": lambda x, y: F.cross_entropy(torch.cat([x[0], x[1]]), y.flatten()),
    "squeezed": lambda x, y: F.cross_entropy(x[:1].squeeze().unsqueeze(0)[0], y[0]),
}


def position_loss(logits: Tensor, target: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, target.clamp_min(0)[..., None]).mean()


def written(logits: Tensor) -> Tensor:
    logits = logits * 1.0
    logits[:, 1] = 0.5
    logits[..., 3:5] = logits[..., 2:4] * 2
    logits[logits > 1.5] = -0.25
    return logits


class Doubled(torch.autograd.Function):
    """A user's own, which knows nothing of slices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 2).exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


WHOLE: dict[str, Use] = {
    "softmax": lambda x, y: x.softmax(-1).square().sum(),
    "position loss": position_loss,
    "entries": lambda x, y: x[..., 2:5].square().sum() + x[..., 0].sum(),
    "product": lambda x, y: (x @ randn(x.shape[-1], 3)).square().mean(),
    "logsumexp": lambda x, y: x.logsumexp(-1).square().sum(),
    "norm": lambda x, y: x.norm(),
    "probabilities": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), randn(B * T, x.shape[-1]).softmax(-1)
    ),
    "classes elsewhere": lambda x, y: F.cross_entropy(x, randn(*x.shape).softmax(1)),
    "topk": lambda x, y: x.topk(2).values.square().sum(),
    "written": lambda x, y: written(x).square().sum(),
    "own function": lambda x, y: Doubled.apply(x).sum(),
    "own hook": lambda x, y: (x + 0).flatten().square().sum(),
    "order": lambda x, y: x.transpose(0, 2).reshape(-1)[:5].square().sum(),
}


def gradient(use: Use, size: int, vocabulary: Vocabulary | None, dtype: torch.dtype) -> Any:
    """The loss, the gradients of x [B, T, D] and of the weight [V, D], and a head's output."""
    x, weight = randn(B, T, D).to(dtype), randn(size, D, seed=2).to(dtype)
    x.requires_grad_()
    head = nn.Linear(D, size, bias=False, dtype=dtype)
    if vocabulary is not None:
        weight = vocabulary.own(weight, -2)
    head.weight = nn.Parameter(weight)
    if vocabulary is not None:
        divide_head(head, vocabulary)
    logits = head(x)
    loss = use(logits, labels(size))
    assert type(loss) is Tensor
    loss.backward()
    return loss.detach(), x.grad, head.weight.grad


def distance(found: Tensor, expected: Tensor, least: float = 1e-3) -> float:
    """The largest difference, relative to the largest number, or to `least`."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(least))


def compare(uses: str, size: int, dtype: torch.dtype) -> dict[str, tuple[float, float, Any]]:
    """By name of a use: how far its loss and its gradients are from whole ones, and its traffic."""
    vocabulary, traffic = start(size)
    found = {}
    for name, use in globals()[uses].items():
        own = gradient(use, size, vocabulary, dtype)
        sent = traffic.take()
        loss, x_grad, weight_grad = gradient(use, size, None, dtype)
        whole_grads = x_grad, vocabulary.own(weight_grad, -2)
        worst = max(map(distance, own[1:], whole_grads))
        found[name] = distance(own[0], loss, 1.0), worst, sent
    return found


@pytest.mark.parametrize(("num_ranks", "size"), [(2, 16), (2, 11), (4, 13), (4, 5), (4, 3)])
@pytest.mark.at_most(1)
def test_loss_of_slices(ranks: Ranks, num_ranks: int, size: int) -> None:
    """Of a vocabulary of 5 on 4 ranks the last one has nothing."""
    for found in ranks(num_ranks).run(compare, "SLICED", size, torch.float32):
        for name, (loss, grad, (calls, _)) in found.items():
            assert loss < 1e-6, name
            assert grad < 1e-5, name
            num_losses = {"chunks": 2, "unbound": 2, "twice": 2}.get(name, 1)
            assert calls == 3 * num_losses + 1, f"{name}: and the gradient of x"


@pytest.mark.parametrize(("num_ranks", "size"), [(2, 11), (4, 13)])
def test_what_needs_the_whole_gets_it(ranks: Ranks, num_ranks: int, size: int) -> None:
    for found in ranks(num_ranks).run(compare, "WHOLE", size, torch.float32):
        for name, (loss, grad, (calls, _)) in found.items():
            assert loss < 1e-6, name
            assert grad < 1e-5, name
            assert calls >= 2, name


# Exact counts


def count(size: int, options: dict[str, Any]) -> Any:
    vocabulary, traffic = start(size)
    x = randn(B, T, D).requires_grad_()
    head = nn.Linear(D, size, bias=False)
    head.weight = nn.Parameter(vocabulary.own(randn(size, D, seed=2), -2))
    divide_head(head, vocabulary)
    found = {}
    logits = head(x)
    found["head"] = traffic.take()
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels(size).flatten(), **options)
    found["loss"] = traffic.take()
    loss.backward()
    found["backward"] = traffic.take()
    logits = head(x)
    logits.softmax(-1).square().sum().backward()
    found["whole"] = traffic.take()
    repr(logits)
    copy.deepcopy(logits.detach())
    assert logits.shape == (B, T, size)
    assert len(logits) == B
    found["printing"] = traffic.take()
    return found


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_messages_of_a_loss(ranks: Ranks, num_ranks: int, options: dict[str, Any]) -> None:
    size, others = 8 * num_ranks - 1, num_ranks - 1
    tokens = 4 * B * T  # bytes of a number per position
    summed = 2 * others * tokens // num_ranks  # sent for a sum, by each rank
    grad = 2 * others * 4 * B * T * D // num_ranks
    gathered = others * tokens * 8
    for found in ranks(num_ranks).run(count, size, options):
        assert found == {
            "head": (0, 0),
            "loss": (3, others * tokens + 2 * summed),  # the largest is found from all of them
            "backward": (1, grad),
            "whole": (2, gathered + grad),
            "printing": (0, 0),
        }


# Embeddings


class Scaled(nn.Embedding):
    """As Gemma's."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.weight.dtype.itemsize


class Functional(nn.Module):
    def __init__(self, size: int, dim: int, padding_idx: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dim))
        self.padding_idx = padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids.flip(0), self.weight, padding_idx=self.padding_idx - 100)


def look_up(size: int, kind: str) -> Any:
    vocabulary, traffic = start(size, "embed")
    whole = randn(size, D)
    ids = labels(size).clamp_min(0)
    padding = int(ids[0, 4])
    made = []
    for weight in (whole, vocabulary.own(whole, -2)):
        module = globals().get(kind, nn.Embedding)(size, D, padding)
        if kind == "Functional":
            module.padding_idx = padding + 100 - size  # counted from the end, as torch allows
        module.weight = nn.Parameter(weight)
        if weight is not whole:
            divide_embedding(module, vocabulary)
        rows = module(ids)
        (rows * randn(B, T, D, seed=3)).sum().backward()
        made.append((rows.detach(), module.weight.grad))
    (rows, grad), (own_rows, own_grad) = made
    assert torch.equal(own_rows, rows)
    return distance(own_grad, vocabulary.own(grad, -2)), traffic.take()


@pytest.mark.parametrize("kind", ["Embedding", "Scaled", "Functional"])
@pytest.mark.parametrize(("num_ranks", "size"), [(2, 11), (4, 5)])
def test_rows_of_a_divided_embedding(ranks: Ranks, num_ranks: int, size: int, kind: str) -> None:
    for grad, sent in ranks(num_ranks).run(look_up, size, kind):
        assert grad < 1e-6
        assert sent == (1, 2 * (num_ranks - 1) * 4 * B * T * D // num_ranks)


# Models of others, with their own losses


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=131, num_attention_heads=2, num_key_value_heads=1, **shape)
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=131, **shape, **ends))


def gemma() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Gemma2ForCausalLM(Gemma2Config(vocab_size=131, **shape, **heads))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    return BertForMaskedLM(BertConfig(vocab_size=131, num_attention_heads=2, **shape))


def our_gpt() -> nn.Module:
    from zrun_core.models.gpt import gpt

    return gpt("llama", vocab_size=131, dim=16, depth=1, heads=2, seq_len=16, loss_chunk=5)


def our_bert() -> nn.Module:
    from zrun_core.models.bert import bert

    return bert(vocab_size=131, dim=16, depth=1, heads=2, seq_len=16)


# The embedding, the head, and the messages of a step: one for rows, three for the loss, one for
# the gradient of the head's input; chunks that are recomputed send theirs again.
MODELS = {
    "llama": ("model.embed_tokens", "lm_head", 5),
    "gpt2": ("transformer.wte", "lm_head", 5),
    "gemma": ("model.embed_tokens", "lm_head", 5),
    "bert": ("bert.embeddings.word_embeddings", "cls.predictions.decoder", 5),
    "our_gpt": ("tokens", "head", 1 + 3 * (3 + 3 + 1)),
    "our_bert": ("tokens", "head.decoder", 5),
}


def divide_ends(model: nn.Module, ends: tuple[str, str], vocabulary: Vocabulary) -> set[str]:
    """Divide what has a row for each entry, by hand; return its names."""
    divided: dict[int, nn.Parameter] = {}
    names = set()
    for prefix, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None and param.shape[0] == vocabulary.size:
                names.add(f"{prefix}.{key}")
                if id(param) not in divided:
                    own = vocabulary.own(param.detach(), -param.dim())
                    divided[id(param)] = nn.Parameter(own)
                module._parameters[key] = divided[id(param)]
    divide_embedding(model.get_submodule(ends[0]), vocabulary)
    divide_head(model.get_submodule(ends[1]), vocabulary)
    return names


def train(kind: str) -> Any:
    torch.manual_seed(0)
    model = globals()[kind]().eval()
    vocabulary, traffic = start(131)
    parts = copy.deepcopy(model)
    names = divide_ends(parts, MODELS[kind][:2], vocabulary)
    ids = labels(131).clamp_min(0)
    given = {"input_ids": ids, "labels": labels(131)}
    found = []
    for each in (model, parts):
        result = each(**given)
        loss = result if isinstance(result, Tensor) else result.loss
        loss.backward()
        found.append(float(loss))
    sent = traffic.take()
    if isinstance(result, dict):
        assert type(result.logits) is LogitSlice
    worst = 0.0
    wholes = dict(model.named_parameters(remove_duplicate=False))
    for name, param in parts.named_parameters(remove_duplicate=False):
        expected = wholes[name].grad
        if expected is None:
            assert param.grad is None
            continue
        if name in names:
            expected = vocabulary.own(expected, -expected.dim())
        worst = max(worst, distance(param.grad, expected))
    with torch.inference_mode():
        answers = [each(ids) for each in (model, parts)]
        answers = [each if isinstance(each, Tensor) else each.logits for each in answers]
        assert torch.equal(*(each.argmax(-1) for each in answers))
    if kind == "llama":
        chances = {"do_sample": True, "top_k": 40, "top_p": 0.9, "temperature": 0.7}
        for options in ({"num_beams": 2}, {"repetition_penalty": 1.2, **chances}):
            texts = []
            for each in (model, parts):
                torch.manual_seed(1)
                texts.append(each.generate(ids, max_new_tokens=4, pad_token_id=0, **options))
            assert torch.equal(*texts)
    return found, worst, sent[0]


def train_all() -> dict[str, Any]:
    return {kind: train(kind) for kind in MODELS}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.thorough
def test_own_losses_of_models(ranks: Ranks, num_ranks: int) -> None:
    for found in ranks(num_ranks).run(train_all):
        for kind, ((whole, own), worst, calls) in found.items():
            assert own == pytest.approx(whole, rel=1e-6), kind
            assert worst < 1e-5, kind
            assert calls == MODELS[kind][2], kind


def own_values(_: str, param: Tensor) -> Tensor:
    return param.detach()


def shard(kind: str, stage: int) -> Any:
    """Gradient norms and losses of three steps, divided and sharded, and of a plain loop."""
    rank, size = world()
    torch.manual_seed(0)
    model = globals()[kind]().eval()
    plain = copy.deepcopy(model)
    places = [ParallelDims(size // 2, tp=2).coordinates(number) for number in range(size)]
    mesh = Mesh.build(rank, ["here"] * size, 1 if stage == 0 else size // 2, places=places)
    comm = Comm(torch.device("cpu"))
    comm.use_cma(mesh.host, 60.0)
    vocabulary = Vocabulary(131, TensorComm(comm, mesh.tensor), "vocabulary")
    table = {}
    for name, param in model.named_parameters():
        shape = tuple(param.shape)
        if shape[0] == vocabulary.size:
            stop = vocabulary.start + vocabulary.num_own
            ranges = [(vocabulary.start, stop)]
            table[name] = sliced_part(name, shape, 0, ranges, size=vocabulary.length)
        else:
            table[name] = full_part(name, shape, param.stride(), ("tensor",))
    divide_ends(model, MODELS[kind][:2], vocabulary)
    settings = ShardingConfig(
        zero=ZeroPolicy(stage),
        precision=Precision.of(PrecisionConfig.model_validate("fp32")),
        optimizer=resolve_optimizer(
            optim_config(name="sgd", lr=0.5, weight_decay=0.0), lambda name: None
        ),
        bucket=1 << 12,
        clip=None,
        no_decay=(),
    )
    sharded = ShardedModel(model, own_values, settings, mesh, comm, table=table)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    given = {"input_ids": labels(131).clamp_min(0), "labels": labels(131)}
    norms, losses = [], []
    for _ in range(3):
        sharded.begin_step()
        with sharded.forward() as micro:
            result = sharded.module(**given)
        loss = result if isinstance(result, Tensor) else result.loss
        losses.append([float(loss)])
        sharded.backward(loss / mesh.data.size, micro, boundary=True)
        sums = NamedVector.of(comm.device)
        step = sharded.step(0.5, sums, lambda sums: torch.ones(()).double())
        norms.append([float(step.grad_norm)])
        result = plain(**given)
        loss = result if isinstance(result, Tensor) else result.loss
        losses[-1].append(float(loss))
        loss.backward()
        norms[-1].append(float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


@pytest.mark.parametrize(("num_ranks", "stage"), [(2, 0), (4, 3)])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "our_gpt"])
@pytest.mark.at_most(2)
def test_a_divided_vocabulary_is_sharded(
    ranks: Ranks, kind: str, num_ranks: int, stage: int
) -> None:
    for losses, norms in ranks(num_ranks).run(shard, kind, stage):
        for own, whole in losses:
            assert own == pytest.approx(whole, rel=1e-6)
        for own, whole in norms:
            assert own == pytest.approx(whole, rel=1e-5)


# Beside torch's own


def beside_dtensor(size: int) -> tuple[float, float]:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel

    vocabulary, _ = start(size)
    whole = 5 * randn(B * T, size)
    flat = labels(size).flatten()
    local = vocabulary.own(whole, -1).requires_grad_()
    loss = F.cross_entropy(logit_slice(local, vocabulary), flat)
    loss.backward()
    mesh = init_device_mesh("cpu", (world()[1],))
    piece = vocabulary.own(whole, -1)[:, : vocabulary.num_own].clone().requires_grad_()
    sharded = DTensor.from_local(piece, mesh, [Shard(1)], shape=whole.shape, stride=whole.stride())
    with loss_parallel():
        theirs = F.cross_entropy(sharded, flat)
        theirs.backward()
    assert not local.grad[:, vocabulary.num_own :].any()
    return (
        distance(loss.detach(), theirs.to_local().detach(), 1.0),
        distance(local.grad[:, : vocabulary.num_own], piece.grad),
    )


@pytest.mark.parametrize("size", [16, 11])
def test_numbers_of_loss_parallel(ranks: Ranks, size: int) -> None:
    for loss, grad in ranks(2).run(beside_dtensor, size):
        assert loss < 1e-6
        assert grad < 1e-5
