"""Parameters that are read outside of their modules, with layers divided: those of one rank."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from distances import assert_close
from runs import VOCAB, losses
from small_jobs import on_axes, small
from torch import nn
from torch.nn import functional
from toys import world

PLAN = {
    **{"*.up": "colwise", "*.down": "rowwise", "*.qkv": "fused 3", "*.out": "rowwise"},
    **{"*.scale": "summed", "head": "head", "embed": "vocabulary"},
}
TP = {"tp": 2}
TP_PP = {"tp": 2, "pp": 2}


def penalty(params: Iterable[torch.Tensor], how: str) -> torch.Tensor:
    found = list(params)
    matrices = [p for p in found if p.dim() == 2]
    if how == "norms":
        return torch.stack([p.norm() for p in found]).sum()
    if how == "gram":
        return torch.stack([(p @ p.T).square().mean() for p in matrices]).sum()
    if how == "cosines":
        same = [functional.cosine_similarity(p[0], p[-1], dim=0) for p in matrices]
        return torch.stack(same).sum()
    if how == "entropy":
        made = [(p.softmax(0) * p).sum() / p.shape[0] + p.max() / p.numel() for p in found]
        return torch.stack(made).sum()
    return torch.stack([p.pow(2).sum() for p in found]).sum()


class Measured(nn.Linear):
    """Knows how large its first weight is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.size = self.weight[0, 0].square()
        return super().forward(x)


class Mlp(nn.Module):
    """Adds a penalty on its weights to what it returns, where `greedy` says."""

    def __init__(self, dim: int, greedy: str) -> None:
        super().__init__()
        self.up = (Measured if greedy == "measured" else nn.Linear)(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.greedy = greedy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.greedy == "first":
            x = x + 0.01 * self.down.weight.norm()
        hidden = self.up(x)
        if self.greedy == "inside":
            hidden = hidden + 0.01 * self.up.weight.norm()
        if self.greedy == "made before":
            hidden = hidden * self.scaling
        out: torch.Tensor = x + self.down(torch.relu(hidden))
        if self.greedy == "behind":
            out = out + 0.01 * self.up.weight.square().sum()
        if self.greedy == "measured":
            out = out + 0.01 * self.up.size
        return out


class Attention(nn.Module):
    """One weight for queries, keys and values; ranks use a scale on their own heads."""

    def __init__(self, dim: int, width: int = 4) -> None:
        super().__init__()
        self.width = width
        self.qkv = nn.Linear(dim, 3 * dim)
        self.scale = nn.LayerNorm(width)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [each.unflatten(-1, (-1, self.width)) for each in self.qkv(x).chunk(3, -1)]
        q, k, v = (each.transpose(1, 2) for each in heads)
        found = functional.scaled_dot_product_attention(self.scale(q), k, v)
        out: torch.Tensor = self.out(found.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, dim: int, greedy: str) -> None:
        super().__init__()
        self.attention = Attention(dim)
        self.mlp = Mlp(dim, greedy)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(x + self.attention(x))
        return out


class Model(nn.Module):
    """Adds a penalty to its loss, of all of its blocks' parameters or of what `of` says."""

    def __init__(self, how: str = "", greedy: str = "", of: str = "blocks", dim: int = 8) -> None:
        super().__init__()
        self.how = how
        self.of = of
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, greedy) for _ in range(4))
        self.head = nn.Linear(dim, VOCAB)
        self.kept = [self.head.weight]
        self.named = nn.Parameter(torch.ones(3)) if of == "late kind" else None
        self.count = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            if block.mlp.greedy == "made before":
                block.mlp.scaling = block.mlp.up.weight.norm()
            x = block(x)
            if self.of == "between":
                x = x + 0.01 * self.head.weight[1]
        if self.of == "tied":
            x = x + 0.1 * functional.linear(functional.linear(x, self.head.weight), self.table())
        logits = self.head(x)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return self.penalised(loss) + self.measured(loss)

    def penalised(self, loss: torch.Tensor) -> torch.Tensor:
        params: Iterable[torch.Tensor] = ()
        if self.of in ("blocks", "tied"):
            params = self.blocks.parameters() if self.how else ()
        elif self.of == "whole":
            params = [self.blocks[0].mlp.down.bias]
        elif self.of == "scales":
            params = self.blocks[1].attention.scale.parameters()
        elif self.of == "kept":
            params = self.kept
        found = list(params)
        return loss + 0.01 * penalty(found, self.how) if found else loss

    def measured(self, loss: torch.Tensor) -> torch.Tensor:
        if self.of == "shapes":
            return loss / self.head.weight.shape[0] + sum(p.numel() for p in self.parameters())
        if self.of == "written":
            with torch.no_grad():
                self.head.weight.clamp_(-1, 1)
        elif self.of == "differentiated":
            of_head = torch.autograd.grad(loss + self.head.weight.norm(), self.head.weight)
            return of_head[0].detach().norm()
        elif self.of == "looked at":
            return 0.01 * self.head.weight.norm() / self.head.weight.norm().item()
        elif self.of == "detached":
            with torch.no_grad():
                size = self.head.weight.norm() + self.head.weight.data.norm()
            return loss * size + self.head.weight.norm()
        elif self.of == "norm on rank 0" and world()[0] == 0:
            print(self.blocks[0].mlp.up.weight.norm())
        elif self.of == "shape on the last" and world()[0] == world()[1] - 1:
            return loss / self.head.weight.shape[0]
        elif self.of == "scale on rank 0" and world()[0] == 0:
            scale = self.blocks[1].attention.scale
            return 0.01 * torch.stack([p.norm() for p in scale.parameters()]).sum()
        elif self.of.startswith("late "):
            self.count += self.training
            return self.measured_late() if self.count > 3 or not self.training else 0 * loss
        return torch.zeros(())

    def measured_late(self) -> torch.Tensor:
        """Look at weights in another forward than the first ones."""
        up = self.blocks[2].mlp.up
        if self.of == "late norm" and self.training:
            return 0.01 * torch.stack([p.norm() for p in up.parameters()]).sum()
        if self.of == "late scale" and self.training:
            return 0.01 * self.blocks[1].attention.scale.weight.square().sum()
        if self.of == "late in evaluation" and not self.training:
            return 0.01 * functional.normalize(self.head.weight).sum()
        if self.of == "late shape" and self.training:
            return 0.01 * torch.ones(up.weight.shape[0]).sum()
        if self.of == "late kind":
            kinds = {(p.dtype, p.device.type, p.requires_grad) for p in self.parameters()}
            assert kinds == {(torch.float32, "cpu", True)}
            assert isinstance(up.weight, nn.Parameter)
            assert sum(isinstance(p, nn.Parameter) for p in [self.embed.weight, up.bias]) == 2
            return 0.01 * self.named.sum()
        return torch.zeros(())

    def table(self) -> torch.Tensor:
        return self.embed.weight.T


def decayed(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(batch["input_ids"], batch["labels"])
    return loss + 0.01 * penalty(model.parameters(), "norms")


def keys_of(parallel: dict[str, Any], **keys: Any) -> dict[str, Any]:
    args = {key: keys.pop(key) for key in ("how", "greedy", "of", "dim") if key in keys}
    model = {"call": "tensor_parallel/test_tensor_penalties.py:Model", "args": args}
    return small(model=model, parallel={"plan": PLAN, **parallel}, **keys)


@pytest.mark.parametrize("how", ["squares", "norms", "gram", "cosines", "entropy"])
@pytest.mark.parametrize("parallel", [TP, TP_PP], ids=["tp", "tp and pp"])
@pytest.mark.at_most(1)
def test_a_penalty_in_the_forward_of_the_model_is_that_of_one_rank(
    ranks,
    tmp_path: Path,
    alone: Any,
    parallel: dict[str, Any],
    how: str,
) -> None:
    keys = keys_of(parallel, how=how)
    assert_close(on_axes(keys, tmp_path / "run", ranks), alone(keys), 1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "keys",
    [{}, {"activations": {"checkpoint": "full"}}, {"precision": "bf16"}],
    ids=["plain", "recomputed", "bf16"],
)
@pytest.mark.at_most(2)
def test_penalties_in_the_loss_function_are_those_of_one_rank(
    ranks,
    tmp_path: Path,
    alone: Any,
    keys: dict[str, Any],
    stage: int,
) -> None:
    keys = {"loss": "tensor_parallel/test_tensor_penalties.py:decayed", "greedy": "behind", **keys}
    given = keys_of(TP, how="gram", **keys)
    found = on_axes({**given, "zero": {"stage": stage}}, tmp_path / "run", ranks, dp=2)
    assert_close(found, alone(given), 5e-3 if "precision" in keys else 1e-6)


@pytest.mark.parametrize("greedy", ["first", "behind"])
@pytest.mark.parametrize(
    "keys",
    [{}, {"activations": {"checkpoint": "full"}}, {"zero": {"stage": 3}}],
    ids=["plain", "recomputed", "zero 3"],
)
@pytest.mark.at_most(1)
def test_a_block_that_reads_its_weights_is_that_of_one_rank(
    ranks,
    tmp_path: Path,
    alone: Any,
    keys: dict[str, Any],
    greedy: str,
) -> None:
    given = keys_of(TP, greedy=greedy, **keys)
    assert_close(on_axes(given, tmp_path / "run", ranks), alone(given), 1e-6)


@pytest.mark.parametrize("of", ["tied", "scales", "shapes", "detached", "whole", "between"])
@pytest.mark.parametrize("parallel", [TP, {"tp": 2, "sequence": True}], ids=["tp", "sequence"])
@pytest.mark.at_most(2)
def test_what_else_is_read_of_weights_is_that_of_one_rank(
    ranks,
    tmp_path: Path,
    alone: Any,
    parallel: dict[str, Any],
    of: str,
) -> None:
    if of == "between" and "sequence" in parallel:
        pytest.skip("is refused: see below")
    keys = keys_of(parallel, of=of, how="norms")
    assert_close(on_axes(keys, tmp_path / "run", ranks), alone(keys), 1e-6)


@pytest.mark.parametrize("parallel", [TP_PP, {**TP_PP, "sequence": True}], ids=["", "sequence"])
@pytest.mark.parametrize("how", ["norms", "squares"])
@pytest.mark.at_most(1)
def test_penalties_on_all_stages_are_those_of_one_rank(
    ranks,
    tmp_path: Path,
    alone: Any,
    parallel: dict[str, Any],
    how: str,
) -> None:
    keys = {"activations": {"checkpoint": "full"}, "zero": {"stage": 2}}
    given = keys_of(
        parallel, how=how, loss="tensor_parallel/test_tensor_penalties.py:decayed", **keys
    )
    assert_close(on_axes(given, tmp_path / "run", ranks), alone(given), 1e-6)


def measure(context: Any) -> None:
    with context.gathered(), torch.no_grad():
        if context.runs_model:
            ids = torch.arange(12).view(1, 12)
            context.metric("measured", float(context.model(ids, ids)))


@pytest.mark.parametrize("parallel", [TP, TP_PP], ids=["tp", "tp and pp"])
@pytest.mark.at_most(1)
def test_evaluations_and_calls_of_hooks_read_whole_weights(
    ranks, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    keys = {
        "eval": {"data": {"call": "runs.py:Plain", "args": {"length": 12}}, "every": 1},
        "hooks": {"on_eval": "tensor_parallel/test_tensor_penalties.py:measure"},
        "loss": "tensor_parallel/test_tensor_penalties.py:decayed",
    }
    many = on_axes(keys_of(parallel, how="gram", **keys), tmp_path / "many", ranks)
    one = on_axes({**keys_of({}, how="gram", **keys), "parallel": {}}, tmp_path / "one", ranks)
    ours, theirs = ([e for e in found[0]["events"] if e["type"] == "eval"] for found in (many, one))
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-6)
    assert logged(many) == pytest.approx(logged(one), rel=1e-5)
    assert logged(one)


def normalize(context: Any) -> None:
    """Divide a weight by its norm, of which a rank of `tp` has a slice."""
    slices = 2 if context.world_size > 1 else 1
    with context.gathered() as model:
        weight = model.blocks[0].mlp.up.weight
        norm = (slices * context.mean(weight.float().square().sum())) ** 0.5
        weight.div_(norm)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.at_most(1)
def test_a_hook_is_told_that_it_has_slices_and_can_add_them_up(
    ranks, tmp_path: Path, dp: int
) -> None:
    keys = {
        "hooks": {"on_step": "tensor_parallel/test_tensor_penalties.py:normalize"},
        "zero": {"stage": 3},
    }
    many = on_axes(keys_of(TP, **keys), tmp_path / "many", ranks, dp=dp)
    one = on_axes({**keys_of({}, **keys), "parallel": {}}, tmp_path / "one", ranks)
    assert_close(many, one, 1e-6)
    told = [event["message"] for event in many[0]["events"] if event["type"] == "log"]
    (line,) = told
    assert line.startswith("hooks.on_step: inside of gathered() ")
    assert "parameters are slices of this rank (parallel.tp): " in line
    assert "blocks.*.attention.out.weight" in line
    assert not [event for event in one[0]["events"] if event["type"] == "log"]


def logged(found: list[dict[str, Any]]) -> list[float]:
    logs = [event for event in found[0]["events"] if event["type"] == "metrics"]
    return [value for event in logs for value in event["values"].values()]


def line_of(text: str, number: int = 0) -> str:
    """Return a place in this file as an error names it."""
    lines = Path(__file__).read_text().splitlines()
    found = [at for at, line in enumerate(lines, 1) if line.strip() == text]
    return f"(test_tensor_penalties.py:{found[number]}"


REFUSED = {
    "in a region": (
        {"greedy": "inside"},
        "blocks.0.mlp.up.weight would be read outside of its module, by blocks.0.mlp",
        "hidden = hidden + 0.01 * self.up.weight.norm()",
    ),
    "made before, used in a region": (
        {"greedy": "made before"},
        "blocks.0.mlp.up.weight would be read outside of its module, by the model or the loss",
        "block.mlp.scaling = block.mlp.up.weight.norm()",
    ),
    "in a list": (
        {"of": "kept"},
        "head.weight would be read outside of its module",
        "return torch.stack([p.pow(2).sum() for p in found]).sum()",
    ),
    "written to": (
        {"of": "written"},
        "head.weight would be read outside of its module, by the model or the loss function",
        "self.head.weight.clamp_(-1, 1)",
    ),
    "differentiated": (
        {"of": "differentiated"},
        "head.weight would be read outside of its module, by the model or the loss function",
        "of_head = torch.autograd.grad(loss + self.head.weight.norm(), self.head.weight)",
    ),
    "looked at": (
        {"of": "looked at"},
        "head.weight would be read outside of its module, by the model or the loss function",
        "return 0.01 * self.head.weight.norm() / self.head.weight.norm().item()",
    ),
    "where sequences are slices": (
        {"of": "between", "sequence": True},
        "head.weight would be read outside of its module, by the model or the loss function",
        "x = x + 0.01 * self.head.weight[1]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.at_most(1)
def test_reads_that_would_be_of_slices_are_named_with_their_line(
    ranks, tmp_path: Path, case: str
) -> None:
    args, named, line = REFUSED[case]
    parallel = {**TP, **({"sequence": True} if "sequence" in args else {})}
    given = {key: value for key, value in args.items() if key != "sequence"}
    found = on_axes(keys_of(parallel, **given), tmp_path, ranks)
    assert {each["code"] for each in found} == {2}
    assert named in found[0]["error"]
    assert line_of(line) in found[0]["error"]


ON_SOME = {
    "norm on rank 0": (
        "blocks.0.mlp.up.weight is read outside of its module on rank 0, by",
        "print(self.blocks[0].mlp.up.weight.norm())",
        "and not on rank 1",
    ),
    "shape on the last": (
        "the shape of head.weight is read outside of its module on rank 1, by",
        "return loss / self.head.weight.shape[0]",
        "and not on rank 0",
    ),
    "scale on rank 0": (
        "blocks.1.attention.scale.bias is read outside of its module on rank 0, by",
        "return 0.01 * torch.stack([p.norm() for p in scale.parameters()]).sum()",
        "and not on rank 1",
    ),
}


@pytest.mark.parametrize("of", ON_SOME)
@pytest.mark.at_most(1)
def test_what_some_ranks_alone_would_gather_is_refused_by_all(
    ranks, tmp_path: Path, of: str
) -> None:
    found = on_axes(keys_of(TP, of=of), tmp_path, ranks)
    assert [each["code"] for each in found] == [2, 2]
    named, line, others = ON_SOME[of]
    for each in found:
        assert named in each["error"]
        assert line_of(line) in each["error"]
        assert others in each["error"]


LATE = {
    "late norm": "blocks.2.mlp.up.weight is read outside of its module",
    "late scale": "blocks.1.attention.scale.weight is read outside of its module",
    "late in evaluation": "head.weight is read outside of its module",
    "late shape": "blocks.2.mlp.up.weight is read outside of its module",
}
_LINES = {
    "late norm": "return 0.01 * torch.stack([p.norm() for p in up.parameters()]).sum()",
    "late scale": "return 0.01 * self.blocks[1].attention.scale.weight.square().sum()",
    "late in evaluation": "return 0.01 * functional.normalize(self.head.weight).sum()",
    "late shape": "return 0.01 * torch.ones(up.weight.shape[0]).sum()",
}


@pytest.mark.parametrize("of", LATE)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.at_most(1)
def test_what_only_a_later_forward_reads_is_named_with_its_line(
    ranks, tmp_path: Path, of: str, stage: int
) -> None:
    keys: dict[str, Any] = {"zero": {"stage": stage}, "guards": {"check_values": False}}
    keys |= {"steps": 6, "batch": {"global": 2, "micro": 2}}
    if of == "late in evaluation":
        keys["eval"] = {"data": {"call": "runs.py:Plain", "args": {"length": 12}}, "every": 2}
    found = on_axes(keys_of(TP, of=of, **keys), tmp_path, ranks)
    assert [each["code"] for each in found] == [2, 2]
    for each in found:
        assert LATE[of] in each["error"]
        assert line_of(_LINES[of]) in each["error"]
    assert set(losses(found[0])) == ({1, 2} if of == "late in evaluation" else {1, 2, 3})


@pytest.mark.parametrize(
    "keys",
    [
        *({}, {"activations": {"checkpoint": "full"}}, {"zero": {"stage": 3}}),
        {"parallel": TP_PP},
    ],
    ids=["plain", "recomputed", "zero 3", "tp and pp"],
)
@pytest.mark.at_most(1)
def test_of_what_kind_a_weight_is_may_be_looked_at_later(
    ranks, tmp_path: Path, alone: Any, keys: dict[str, Any]
) -> None:
    evaluation = {"data": {"call": "runs.py:Plain", "args": {"length": 12}}, "every": 2}
    given = keys_of(keys.pop("parallel", TP), of="late kind", steps=3, eval=evaluation, **keys)
    assert_close(on_axes(given, tmp_path / "run", ranks), alone(given), 1e-6)


def test_compiled_blocks_gather_nothing(ranks, tmp_path: Path) -> None:
    keys = keys_of(TP, how="norms", compile=True)
    found = on_axes(keys, tmp_path, ranks)
    assert {each["code"] for each in found} == {2}
    assert "outside of its module" in found[0]["error"]
    assert "write compile: false" in found[0]["error"]


@pytest.mark.parametrize(
    "parallel",
    [TP, TP_PP, {**TP_PP, "schedule": "pipedream"}],
    ids=["tp", "tp and pp", "pipedream"],
)
@pytest.mark.at_most(1)
def test_ranks_whose_losses_differ_end_in_the_first_step(
    ranks, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    plan = {"*.up": "colwise", "*.down": "rowwise"}  # a divided head would make one loss of all
    keys = keys_of({"plan": plan, **parallel}, greedy="measured")
    if parallel.get("schedule") == "pipedream":
        keys |= {"batch": {"global": 2, "micro": 2}, "steps": 8, "optim": {"lr": 1e-2}}
    found = on_axes(keys, tmp_path / "checked", ranks)
    assert {each["code"] for each in found} == {2}
    assert ": blocks.0 computes something else than in the whole model" in found[0]["error"]
    keys["guards"] = {"check_values": False}
    found = on_axes(keys, tmp_path / "not checked", ranks)
    assert {each["code"] for each in found} == {10}
    assert "in step 1 ranks that share layers (parallel.tp) computed different" in found[0]["error"]
