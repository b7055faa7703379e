"""What a divided model computes is compared with the whole one before the first step."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from between_linears import PLAN, RIGHT, WRONG, WRONG_BACKWARD, Block, Model
from runs import VOCAB, losses, run
from small_jobs import gpt, on_axes, small
from torch import nn

from zrun_core.checkpoint.whole_values import WholeValues, newest_step
from zrun_core.spine.spec import ResumeSpec
from zrun_core.train import rank_builder, value_check
from zrun_core.train.gradient_check import SavedTensors


class OfFour(Model):
    """It takes four samples, and no other number."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids.view(4, 1, -1).flatten(0, 1), labels)


def stacked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([each[key] for each in samples]) for key in samples[0]}


def keys_of(function: str, **keys: Any) -> dict[str, Any]:
    model = {"call": "between_linears.py:Model", "args": {"function": function}}
    return small(model=model, parallel={"tp": 2, "plan": PLAN}, **keys)


@pytest.mark.parametrize("function", WRONG)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.at_most(6)
def test_what_mixes_or_counts_features_is_refused(
    ranks, tmp_path: Path, function: str, precision: str
) -> None:
    found = on_axes(keys_of(function, precision=precision), tmp_path, ranks)
    assert {each["code"] for each in found} == {2}, function
    error = found[0]["error"]
    is_by_values = "parallel.tp 2: blocks.2 computes something else than in the whole" in error
    assert is_by_values or "with the slices of blocks.2.up" in error or "over" in error


@pytest.mark.parametrize(
    ("function", "precision"),
    [
        *((name, "fp32") for name in WRONG_BACKWARD),
        *((name, half) for name in ("normalized", "over the width") for half in ("bf16", "fp16")),
    ],
)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.at_most(4)
def test_backwards_that_mix_or_count_features_are_refused(
    ranks, tmp_path: Path, function: str, precision: str, stage: int
) -> None:
    keys = keys_of(f"backward {function}", precision=precision, zero=stage)
    found = on_axes(keys, tmp_path, ranks, dp=2 if stage == 0 else 1)
    for each in found:
        assert each["code"] == 2
        assert "parallel.tp 2: the gradient of blocks.2.up." in each["error"]
        assert "though the forward is the same" in each["error"]


class Experts(nn.Module):
    """Packed: every token goes to all of them. `ended` is what becomes of what they make."""

    def __init__(self, dim: int, ended: str) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 2 * dim, dim) / 4)
        self.down = nn.Parameter(torch.randn(3, dim, 2 * dim) / 4)
        self.bias = nn.Parameter(torch.randn(3, dim))
        self.ended = ended

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1).expand(3, -1, -1)
        made = F.gelu(tokens @ self.up.transpose(1, 2)) @ self.down.transpose(1, 2)
        if self.ended == "norm":
            return F.layer_norm(made, made.shape[-1:]).sum(0).view_as(x) + self.bias.sum(0)
        out = (made + self.bias[:, None]).sum(0).view_as(x)
        return out + x if self.ended == "added" else out


class OfExperts(Model):
    def __init__(self, ended: str) -> None:
        super().__init__("gelu", depth=2)
        self.blocks = nn.ModuleList(Experts(16, ended) for _ in range(2))


EXPERTS = {
    "blocks.*": "experts",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "blocks.*.bias": "once",
}


@pytest.mark.parametrize(
    ("ended", "roles"),
    [("sum", {}), ("sum", {"blocks.*.bias": "summed"}), ("added", {}), ("norm", {})],
    ids=["right", "a bias of each rank", "a whole tensor is added", "a norm of parts"],
)
@pytest.mark.at_most(2)
def test_experts_have_to_return_a_sum_of_parts(
    ranks, tmp_path: Path, ended: str, roles: dict[str, str]
) -> None:
    model = {"call": "tensor_parallel/test_value_check.py:OfExperts", "args": {"ended": ended}}
    keys = small(model=model, parallel={"tp": 2, "plan": EXPERTS | roles})
    found = on_axes(keys, tmp_path / "two", ranks)
    if ended == "sum" and not roles:
        one = on_axes({**keys, "parallel": {}}, tmp_path / "one", ranks)
        assert losses(found[0]) == pytest.approx(losses(one[0]), rel=1e-6) != {}
        return
    assert [each["code"] for each in found] == [2, 2]
    for words in ("parallel.tp 2: the model computes something else", "guards.trust: [loss]"):
        assert words in found[0]["error"]


def test_a_backward_of_each_feature_trains(ranks, tmp_path: Path) -> None:
    keys = keys_of("backward reversed")
    found = on_axes(keys, tmp_path / "two", ranks)
    one = on_axes({**keys, "parallel": {}}, tmp_path / "one", ranks)
    assert notes(found) == []
    assert losses(found[0]) == pytest.approx(losses(one[0]), rel=1e-6)


@pytest.mark.parametrize("function", RIGHT)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.at_most(2)
def test_what_is_of_each_feature_trains(
    ranks, tmp_path: Path, function: str, precision: str
) -> None:
    keys = keys_of(function, precision=precision)
    found = on_axes(keys, tmp_path / "two", ranks)
    one = on_axes({**keys, "parallel": {}}, tmp_path / "one", ranks)
    assert losses(found[0]) == pytest.approx(
        losses(one[0]), rel=1e-6 if precision == "fp32" else 0.02
    )
    assert notes(found) == []


class ReadingBlock(Block):
    """Leaves a number that is read outside of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x)
        self.size = float(out.detach().abs().mean())
        return out


class Reading(Model):
    """A forward that cannot be followed without values, of blocks that add their input."""

    def __init__(self) -> None:
        super().__init__("gelu")
        self.blocks = nn.ModuleList(ReadingBlock(16, "gelu") for _ in range(4))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = super().forward(input_ids, labels)
        return loss + 0.1 * sum(block.size for block in self.blocks)


def test_a_block_that_adds_its_input_and_reads_values_is_that_of_one_rank(
    ranks, tmp_path: Path
) -> None:
    keys = small(
        model="tensor_parallel/test_value_check.py:Reading",
        parallel={"tp": 2, "plan": PLAN},
        steps=4,
    )
    found = on_axes(keys, tmp_path / "two", ranks)
    one = on_axes({**keys, "parallel": {}}, tmp_path / "one", ranks)
    assert losses(found[0]) == pytest.approx(losses(one[0]), rel=1e-6)
    assert len(losses(one[0])) == 4
    assert notes(found) == []


def test_he_may_insist(ranks, tmp_path: Path) -> None:
    found = on_axes(keys_of("over the width", guards={"check_values": False}), tmp_path, ranks)
    assert len(losses(found[0])) > 0


@pytest.mark.parametrize(
    ("function", "trust", "told"),
    [
        ("over the width", ["blocks.2"], "with parallel.tp 2 blocks.2 is another than in the whol"),
        ("over the width", ["blocks.?"], "with parallel.tp 2 blocks.2 is another than in the whol"),
        ("backward centered", ["blocks.2"], "with parallel.tp 2 the gradient of blocks.2.up.bias "),
        ("gelu", ["blocks.2"], ""),
    ],
)
@pytest.mark.at_most(1)
def test_he_may_insist_by_name_and_each_start_tells(
    ranks, tmp_path: Path, function: str, trust: list[str], told: str
) -> None:
    keys = keys_of(function, guards={"trust": trust}, checkpoint={"every": 2}, steps=4)
    folder = tmp_path / "run"
    found = on_axes(keys, folder, ranks)
    saved = {"folder": f"{folder}/checkpoints", "step": 2}
    again = ranks(2).run(run, keys, str(tmp_path / "later"), saved, None, None, {"dp": 1, "tp": 2})
    for each in (found, again):
        assert len(losses(each[0])) > 0, each[0]["error"]
        (start,) = (event for event in each[0]["events"] if event["type"] == "start")
        trusted = [note for note in start.get("notes", []) if note.startswith("guards.trust: ")]
        assert len(trusted) == (1 if told else 0)
        assert all(told in note for note in trusted)


@pytest.mark.parametrize("trust", [["blocks.3"], ["loss"], ["blocks"]])
@pytest.mark.at_most(1)
def test_what_is_not_named_is_refused(ranks, tmp_path: Path, trust: list[str]) -> None:
    found = on_axes(keys_of("over the width", guards={"trust": trust}), tmp_path, ranks)
    assert {each["code"] for each in found} == {2}
    assert "if it is right, guards.trust: [blocks.2] trains it all the sa" in found[0]["error"]


def notes(found: list[dict[str, Any]]) -> list[str]:
    """What was said of a comparison that was not made."""
    (start,) = (event for event in found[0]["events"] if event["type"] == "start")
    return [note for note in start.get("notes", []) if "not compared before training" in note]


class Leaving(Model):
    """Leaves out the third block, but in some batches."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for number, block in enumerate(self.blocks):
            if number != 2 or len(labels) > 99:
                x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    "parallel", [{}, {"plan": {"blocks.0.up": "colwise", "blocks.0.down": "rowwise"}}]
)
def test_a_block_that_nobody_has_seen_in_slices_is_refused(
    ranks, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    model = {
        "call": "tensor_parallel/test_value_check.py:Leaving",
        "args": {"function": "over the width"},
    }
    keys = keys_of("gelu") | {"model": model}
    keys["parallel"] = keys["parallel"] | parallel
    found = on_axes(keys, tmp_path, ranks)
    if parallel:
        assert {each["code"] for each in found} == {0}, found[0]["error"]
        return
    assert {each["code"] for each in found} == {2}
    assert "the forward of the first micro-batch leaves out blocks.2, so" in found[0]["error"]
    assert "guards.trust: [blocks.2]" in found[0]["error"]


class Backwards(nn.Module):
    """A block that turns the order of the tokens round."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(1) + self.down(F.gelu(self.up(x)))


class Hiding(nn.Module):
    """Backwards, and in the first numbers that are drawn, or in its loss, nothing of it is seen."""

    def __init__(self, hides: str, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Backwards(dim) for _ in range(2))
        self.head = nn.Linear(dim, VOCAB)
        self.hides = hides
        if hides == "in the loss":
            nn.init.zeros_(self.head.weight)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        if self.hides == "in the draw":
            x = x * float(np.random.rand() > 0.6)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("hides", ["in the draw", "in the loss"])
@pytest.mark.at_most(1)
def test_tokens_in_another_order_are_seen_wherever_they_hide(
    ranks, tmp_path: Path, hides: str
) -> None:
    model = {"call": "tensor_parallel/test_value_check.py:Hiding", "args": {"hides": hides}}
    parallel = {"tp": 2, "plan": PLAN, "sequence": True}
    for seed in range(3):
        keys = small(model=model, parallel=parallel, seed=seed)
        error = on_axes(keys, tmp_path / str(seed), ranks)[0]["error"]
        assert "blocks.0 computes something else than in the whole model" in error
        assert "write parallel.sequence: false" in error


@pytest.mark.parametrize("function", ["gelu", "flipped"])
def test_a_model_of_one_size_is_compared_with_all_samples(
    ranks, tmp_path: Path, function: str
) -> None:
    model = {"call": "tensor_parallel/test_value_check.py:OfFour", "args": {"function": function}}
    keys = {**keys_of(function, batch={"global": 8, "micro": 4}), "model": model}
    found = on_axes(keys, tmp_path, ranks)
    if function == "gelu":
        assert [each["code"] for each in found] == [0, 0]
        assert notes(found) == []
        return
    assert [each["code"] for each in found] == [2, 2]
    assert "blocks.2 computes something else than in the whole" in found[0]["error"]


@pytest.mark.parametrize("collate", [None, "tensor_parallel/test_value_check.py:stacked"])
@pytest.mark.at_most(1)
def test_two_samples_are_compared_of_what_torch_collates(
    ranks, tmp_path: Path, collate: str | None
) -> None:
    """Of the user's own batches nobody knows what is of one sample."""
    keys = keys_of("of two samples", batch={"global": 8, "micro": 4})
    keys["data"] = {"call": keys["data"], "collate": collate}
    found = on_axes(keys, tmp_path, ranks)
    code = 2 if collate is None else 0
    assert [each["code"] for each in found] == [code, code]


def test_a_model_that_differs_from_itself_is_not_compared(ranks, tmp_path: Path) -> None:
    model = {"call": "between_linears.py:Fickle", "args": {"function": "gelu"}}
    found = on_axes(small(model=model, parallel={"pp": 2}), tmp_path, ranks)
    assert notes(found) == [
        "not compared before training with what the whole model computes: its loss differs from "
        "one forward to the next with the same random numbers"
    ]


def test_numbers_that_ranks_draw_for_themselves_are_not_compared(ranks, tmp_path: Path) -> None:
    keys = small(
        model="tensor_parallel/test_value_check.py:Drawing", parallel={"tp": 2, "plan": PLAN}
    )
    assert "ranks draw their own random numbers" in notes(on_axes(keys, tmp_path, ranks))[0]


class Drawing(Model):
    """Adds noise between its linears, also where it is only evaluated."""

    def __init__(self) -> None:
        super().__init__("gelu")
        for block in self.blocks:
            block.up.register_forward_hook(lambda _, args, out: out + torch.randn_like(out))


@pytest.mark.parametrize(
    "parallel",
    [
        {"tp": 2},
        {"tp": 2, "sequence": True},
        {"pp": 2},
        {"pp": 2, "schedule": "interleaved"},
        {"pp": 2, "tp": 2, "sequence": True},
    ],
    ids=["tp", "sequence", "pp", "interleaved", "all"],
)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.at_most(1)
def test_a_comparison_changes_nothing(
    ranks, tmp_path: Path, parallel: dict[str, Any], stage: int
) -> None:
    keys = small(model=gpt(), parallel=parallel, zero=stage)
    with_it = on_axes(keys, tmp_path / "with", ranks, dp=1)
    without = on_axes(
        {**keys, "guards": {"check_values": False}}, tmp_path / "without", ranks, dp=1
    )
    assert notes(with_it) == []
    assert losses(with_it[0]) == losses(without[0]) != {}
    assert [each["digest"] for each in with_it] == [each["digest"] for each in without]


@pytest.mark.parametrize("flavour", ["gpt2", "llama"])
@pytest.mark.at_most(1)
def test_evaluations_in_halves_go_between_stages(ranks, tmp_path: Path, flavour: str) -> None:
    """The comparison has sent activations in fp32."""
    evaluation = {"data": {"call": "runs.py:Plain", "args": {"length": 4}}, "every": 2}
    parallel = {"tp": 2, "pp": 2}
    model = gpt(flavour=flavour)
    keys = small(model=model, parallel=parallel, precision="bf16", eval=evaluation)
    found = on_axes(keys, tmp_path, ranks)
    assert notes(found) == []
    assert [each["error"] for each in found] == [""] * 4
    assert any(event["type"] == "eval" for event in found[0]["events"])


class Hooked(Model):
    def __init__(self) -> None:
        super().__init__("gelu")
        self.head.weight.register_hook(lambda grad: 2 * grad)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (
            {"model": "tensor_parallel/test_value_check.py:Hooked"},
            "head.weight has hooks of yours on its gradient",
        ),
        ({"schedule": "layer_major", "tp": 2}, "this schedule makes no step on trial"),
        ({"schedule": "pipedream"}, "this schedule makes no step on trial"),
    ],
    ids=["hooks", "layer_major", "pipedream"],
)
@pytest.mark.at_most(2)
def test_why_gradients_are_not_compared(
    ranks, tmp_path: Path, keys: dict[str, Any], why: str
) -> None:
    parallel = {"pp": 2, **keys}
    model = parallel.pop("model", gpt())
    if "tp" in keys:
        del parallel["pp"]
    keys = small(model=model, parallel=parallel, batch={"global": 2, "micro": 2})
    keys["optim"] = {"name": "sgd", "lr": 0.1}
    found = on_axes(keys, tmp_path, ranks)
    assert notes(found) == [
        "its gradients are not compared before training with what the whole model computes: " + why
    ]


def test_activations_that_take_too_much_end_the_forward() -> None:
    model = Model("gelu")
    batch = torch.zeros(2, 6, dtype=torch.long)
    saved = SavedTensors(model, 1e6)
    with saved:
        model(batch, batch)
    assert not saved.too_many
    few = SavedTensors(model, 1e3)
    with pytest.raises(MemoryError), few:
        model(batch, batch)
    assert few.too_many


def saved(folder: Path, function: str) -> dict[str, Any]:
    """Write the weights of another model than the seed makes; return what begins with them."""
    from safetensors.torch import save_file

    torch.manual_seed(91)
    path = folder / "weights.safetensors"
    save_file(Model(function).state_dict(), path)
    return {"path": str(path)}


@pytest.mark.parametrize("init", ["factory", "meta"])
@pytest.mark.parametrize("name", ["init_from", "init"])
@pytest.mark.at_most(2)
def test_values_of_files_and_of_meta_are_compared(
    ranks, tmp_path: Path, init: str, name: str
) -> None:
    """A right model trains as on one rank; one whose halves are mixed is refused."""
    keys: dict[str, Any] = {"init": init}
    if name == "init_from":
        keys["init_from"] = saved(tmp_path, "gelu")
    if init == "meta":
        keys["model"] = {"call": "between_linears.py:Model", "args": {"function": "gelu"}}
    right = on_axes({**keys_of("gelu"), **keys}, tmp_path / "right", ranks)
    one = on_axes({**keys_of("gelu"), **keys, "parallel": {}}, tmp_path / "one", ranks)
    assert notes(right) == []
    assert losses(right[0]) == pytest.approx(losses(one[0]), rel=1e-6) != {}
    keys.pop("model", None)
    wrong = on_axes({**keys_of("flipped"), **keys}, tmp_path / "wrong", ranks)
    assert [each["code"] for each in wrong] == [2, 2]
    assert "blocks.2 computes something else than in the whole" in wrong[0]["error"]


@pytest.mark.thorough
def test_what_is_compiled_is_compared_as_it_was(ranks, tmp_path: Path) -> None:
    wrong = on_axes({**keys_of("flipped"), "compile": True}, tmp_path / "wrong", ranks)
    assert [each["code"] for each in wrong] == [2, 2]
    right = on_axes({**keys_of("gelu"), "compile": True}, tmp_path / "right", ranks)
    assert notes(right) == []


@pytest.mark.parametrize("function", ["gelu", "flipped"])
def test_a_run_that_goes_on_at_tp_is_compared(ranks, tmp_path: Path, function: str) -> None:
    """It was saved by one rank, where both models are right."""
    keys = {**keys_of(function, steps=4), "checkpoint": {"every": 2}}
    ranks(1).run(run, {**keys, "parallel": {}, "steps": 2}, str(tmp_path))
    found = ranks(2).run(run, keys, str(tmp_path), {}, None, None, {"dp": 1, "tp": 2})
    if function == "gelu":
        assert notes(found) == []
        assert sorted(losses(found[0])) == [3, 4]
    else:
        assert [each["code"] for each in found] == [2, 2]
        assert "blocks.2 computes something else than in the whole" in found[0]["error"]


class Noting(Model):
    """Keeps more in its `state_dict` than tensors; `size` is that of its table, a buffer."""

    def __init__(self, function: str, size: list[int]) -> None:
        super().__init__(function)
        self.register_buffer("table", torch.ones(size))

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def noting(function: str, size: list[int], **keys: Any) -> dict[str, Any]:
    model = {
        "call": "tensor_parallel/test_value_check.py:Noting",
        "args": {"function": function, "size": size},
    }
    return small(model=model, parallel={"tp": 2, "plan": PLAN}, **keys)


@pytest.mark.parametrize("function", ["gelu", "flipped"])
def test_what_is_no_tensor_in_a_state_dict_is_left_out(
    ranks, tmp_path: Path, function: str
) -> None:
    """`set_extra_state` is for the model's own code: init_from gives it nothing."""
    state = Noting(function, [4]).state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    torch.save(tensors, tmp_path / "weights.pt")
    keys = noting(function, [4], init_from={"path": str(tmp_path / "weights.pt")})
    found = on_axes(keys, tmp_path / "run", ranks)
    if function == "gelu":
        assert notes(found) == []
        assert losses(found[0]) != {}
    else:
        assert [each["code"] for each in found] == [2, 2]
        assert "blocks.2 computes something else than in the whole" in found[0]["error"]


@pytest.mark.parametrize("size", [[4], [8, 4], [2, 2, 4]], ids=["fewer", "longer", "more"])
@pytest.mark.at_most(1)
def test_a_run_that_goes_on_with_other_shapes_is_told_so_by_all_ranks(
    ranks, tmp_path: Path, size: list[int]
) -> None:
    keys: dict[str, Any] = {"steps": 4, "checkpoint": {"every": 2}}
    saved_by = noting("gelu", [4, 4], **keys) | {"parallel": {}, "steps": 2}
    ranks(1).run(run, saved_by, str(tmp_path))
    dims = {"dp": 1, "tp": 2}
    found = ranks(2).run(run, noting("gelu", size, **keys), str(tmp_path), {}, None, None, dims)
    assert [each["code"] for each in found] == [9, 9]
    assert all("it is another model" in each["error"] for each in found)


def run_on(keys: dict[str, Any], folder: str, patience: float, problem: str = "") -> dict[str, Any]:
    """Go on, with another `_PATIENCE`; as "locked", whether the folder is as it is first read.

    `problem` is what an error says that is raised there, one that nobody has thought of.
    """
    found: list[bool] = []

    def opened(source: ResumeSpec) -> WholeValues:
        lock = os.open(Path(source.folder) / ".lock", os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append(False)
        except BlockingIOError:
            found.append(True)
        finally:
            os.close(lock)
        if problem:
            raise AttributeError(problem)
        return newest_step(source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_builder, "newest_step", opened)
        patch.setattr(value_check, "_PATIENCE", patience)
        return {**run(keys, folder, {}, None, None, {"dp": 1, "tp": 2}), "locked": found}


@pytest.mark.parametrize(
    ("patience", "problem", "why"),
    [
        (0.25, "", None),
        (0.0, "", "reading {step} on one rank takes more than 0s"),
        (0.25, "no such thing\nat all", "on one rank its forward fails: AttributeError: no such"),
    ],
    ids=["in time", "late", "an error"],
)
def test_values_are_read_behind_the_lock_and_for_a_part_of_what_others_wait(
    ranks, tmp_path: Path, patience: float, problem: str, why: str | None
) -> None:
    keys = {**keys_of("gelu", steps=4), "checkpoint": {"every": 2}}
    ranks(1).run(run, {**keys, "parallel": {}, "steps": 2}, str(tmp_path))
    found = ranks(2).run(run_on, keys, str(tmp_path), patience, problem)
    assert [each["locked"] for each in found] == [[True], []]
    assert sorted(losses(found[0])) == [3, 4]
    if why is None:
        assert notes(found) == []
    else:
        (note,) = notes(found)
        step = tmp_path / "checkpoints" / "step-00000002"
        assert note.startswith(value_check.not_compared(why.format(step=step)))
