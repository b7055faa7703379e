"""Hooks call a model that is cut into stages: all of them together, with the text of one rank."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import VOCAB, job, run
from small_jobs import transformer
from torch import nn
from toys import Block

PROMPT = [[5, 6, 7], [8, 9, 3]]


def write(context: Any, sample: bool = False, other_prompts: bool = False) -> None:
    """Continue two prompts, and keep what this rank has found."""
    with context.gathered() as model:
        if not context.runs_model:
            return
        prompt = torch.tensor(PROMPT) + int(other_prompts and context.rank)
        args = {"do_sample": sample, "max_new_tokens": 5, "pad_token_id": 0}
        model.eval()
        found = [model.generate(prompt, **args) for _ in range(2)]
        logits = model(prompt).logits
        model.train()
    texts = [each.tolist() for each in found]
    place = context.run_dir / f"text-{context.step}-{context.rank}.json"
    place.write_text(json.dumps([texts, logits.float().tolist()]))


class Answering(nn.Module):
    """Returns an object of no kind that is known as a container."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(4))
        self.head = nn.Linear(8, VOCAB)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, SimpleNamespace] | SimpleNamespace:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        found = SimpleNamespace(logits=self.head(x), name="answer", loss=None)
        if labels is None:
            return {"found": found}
        found.loss = nn.functional.cross_entropy(found.logits.flatten(0, 1), labels.flatten())
        return found


class Skipping(nn.Module):
    """What it embeds goes into each block, and what the first block makes into the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(4))
        self.head = nn.Linear(8, VOCAB)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, SimpleNamespace] | SimpleNamespace:
        first = x = self.embed(input_ids)
        made = []
        for block in self.blocks:
            x = block(x) + 0.5 * first
            made.append(x)
        found = SimpleNamespace(logits=self.head(x + made[0]), name="answer", loss=None)
        if labels is None:
            return {"found": found}
        found.loss = nn.functional.cross_entropy(found.logits.flatten(0, 1), labels.flatten())
        return found


def answer(context: Any) -> None:
    """Keep what the model returns where this rank calls it."""
    with context.gathered() as model, torch.no_grad():
        found = model(torch.tensor(PROMPT))["found"]
    assert (found.name, found.loss) == ("answer", None)
    place = context.run_dir / f"text-{context.step}-{context.rank}.json"
    place.write_text(json.dumps(found.logits.tolist()))


def keys_of(name: str, hook: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    call = {"call": "stages/test_pipeline_calls.py:write", "args": hook or {}}
    return job(
        **{
            **transformer(name, num_hidden_layers=4),
            "steps": 2,
            "batch": {"global": 4, "micro": 1},
            "hooks": {"on_step": call},
            "checkpoint": None,
            **more,
        }
    )


def texts(folder: Path, step: int) -> list[Any]:
    """What each rank has written after a step."""
    return [json.loads(each.read_text()) for each in sorted(folder.rglob(f"text-{step}-*.json"))]


@pytest.mark.parametrize(
    ("name", "dims", "more"),
    [
        ("MixtralForCausalLM", {"pp": 2}, {}),
        ("LlamaForCausalLM", {"pp": 4}, {"zero": 1}),
        ("LlamaForCausalLM", {"dp": 2, "pp": 2}, {"zero": 3}),
        ("MixtralForCausalLM", {"tp": 2, "pp": 2}, {}),
        ("GPT2LMHeadModel", {"pp": 2}, {"parallel": {"pp": 2, "schedule": "gpipe"}}),
    ],
)
@pytest.mark.at_most(1)
def test_text_is_that_of_one_rank(
    ranks, tmp_path: Path, name: str, dims: dict[str, int], more: dict[str, Any]
) -> None:
    assert_same_text(ranks, tmp_path, name, dims, more)


@pytest.mark.parametrize(
    ("name", "dims", "more"),
    [
        ("LlamaForCausalLM", {"pp": 2}, {}),
        ("MixtralForCausalLM", {"dp": 2, "pp": 2}, {"zero": 3}),
    ],
)
@pytest.mark.at_most(1)
def test_stages_of_several_chunks_come_through_one_call(
    ranks, tmp_path: Path, name: str, dims: dict[str, int], more: dict[str, Any]
) -> None:
    parallel = {"tp": dims.get("tp", 1), "pp": 2, "schedule": "interleaved"}
    assert_same_text(ranks, tmp_path, name, dims, {"parallel": parallel, **more})


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MixtralForCausalLM"])
@pytest.mark.parametrize("dims", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
@pytest.mark.at_most(1)
def test_a_length_that_ranks_do_not_divide_stays_whole(
    ranks, tmp_path: Path, name: str, dims: dict[str, int]
) -> None:
    """Prompts have three tokens, and then one comes after the other."""
    parallel = {**dims, "sequence": True, "schedule": "interleaved" if "pp" in dims else "1f1b"}
    assert_same_text(ranks, tmp_path, name, dims, {"parallel": parallel})


def assert_same_text(
    ranks: Any, tmp_path: Path, name: str, dims: dict[str, int], more: dict[str, Any]
) -> None:
    sizes = {"dp": 1, "pp": 1, "tp": 1} | dims
    parallel = {key: sizes[key] for key in ("pp", "tp")}
    keys = keys_of(name, **{"parallel": parallel, **more})
    number = sizes["dp"] * sizes["pp"] * sizes["tp"]
    many = ranks(number).run(run, keys, str(tmp_path / "many"), None, None, None, sizes)
    alone = keys_of(name, parallel={"draws": "block"})  # of dropout
    one = ranks(1).run(run, alone, str(tmp_path / "one"))
    assert not any(found["error"] for found in (*one, *many))
    for step in (1, 2):
        ((expected, logits),) = texts(tmp_path / "one", step)
        written = texts(tmp_path / "many", step)
        assert len(written) == sizes["pp"] * sizes["tp"], "one copy of the model"
        for text, own_logits in written:
            assert text == expected
            torch.testing.assert_close(
                torch.tensor(own_logits), torch.tensor(logits), rtol=1e-4, atol=1e-5
            )


class DropsFirst(nn.Module):
    """A block with dropout in front of its divided linears."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(x)
        return x + self.down(self.up(x).relu())


class Dropping(Answering):
    """Drops within its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DropsFirst() for _ in range(2))


def test_ranks_drop_the_same_of_a_sequence_that_stays_whole(ranks, tmp_path: Path) -> None:
    """The hook leaves the model in training mode, and gives it three tokens."""
    keys = job(
        model="stages/test_pipeline_calls.py:Dropping",
        data="runs.py:Plain",
        steps=2,
        hooks={"on_step": "stages/test_pipeline_calls.py:answer"},
        parallel={"tp": 2, "sequence": True, "plan": {"*.up": "colwise", "*.down": "rowwise"}},
        checkpoint=None,
    )
    dims = {"dp": 1, "pp": 1, "tp": 2}
    found = ranks(2).run(run, keys, str(tmp_path), None, None, None, dims)
    assert not [each["error"] for each in found if each["error"]]
    first, second = texts(tmp_path, 2)
    assert first == second
    assert first != texts(tmp_path, 1)[0]


@pytest.mark.thorough
def test_stages_draw_the_same_text(ranks, tmp_path: Path) -> None:
    keys = keys_of("LlamaForCausalLM", {"sample": True}, parallel={"pp": 2})
    dims = {"dp": 1, "pp": 2}
    found = ranks(2).run(run, keys, str(tmp_path), None, None, None, dims)
    assert not any(each["error"] for each in found)
    first, second = texts(tmp_path, 2)
    assert first == second
    assert first[0][0] != first[0][1], "two draws"
    assert texts(tmp_path, 1)[0][0] != first[0]


def test_other_prompts_on_each_stage_are_refused(ranks, tmp_path: Path) -> None:
    keys = keys_of("LlamaForCausalLM", {"other_prompts": True}, parallel={"pp": 2})
    with pytest.raises(AssertionError) as error:  # of the pool, which says what each rank raised
        ranks(2).run(run, keys, str(tmp_path), None, None, None, {"dp": 1, "pp": 2})
    assert "this one was given other tensors than the stage before" in str(error.value)


@pytest.mark.parametrize(
    ("model", "schedule"), [("Answering", "1f1b"), ("Skipping", "interleaved")]
)
def test_objects_that_hold_tensors_come_back_from_the_last_stage(
    ranks, tmp_path: Path, model: str, schedule: str
) -> None:
    keys = job(
        model=f"stages/test_pipeline_calls.py:{model}",
        data="runs.py:Plain",
        steps=2,
        hooks={"on_step": "stages/test_pipeline_calls.py:answer"},
        checkpoint=None,
    )
    dims = {"dp": 1, "pp": 2}
    many = ranks(2).run(
        run,
        {**keys, "parallel": {"pp": 2, "schedule": schedule}},
        str(tmp_path / "many"),
        None,
        None,
        None,
        dims,
    )
    one = ranks(1).run(run, keys, str(tmp_path / "one"))
    assert not [found["error"] for found in (*one, *many) if found["error"]]
    (expected,) = texts(tmp_path / "one", 1)
    first, last = texts(tmp_path / "many", 1)
    assert first == last
    torch.testing.assert_close(torch.tensor(first), torch.tensor(expected))
