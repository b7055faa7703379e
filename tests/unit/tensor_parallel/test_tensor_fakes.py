"""What a forward without values finds out about a plan of tensor parallelism."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zrun_core.errors import JobError
from zrun_core.models.bert import bert
from zrun_core.models.gpt import gpt
from zrun_core.spine.sections.parallel import ParallelConfig
from zrun_core.tensor_parallel.borders import cross
from zrun_core.tensor_parallel.fake_check import check_on_fakes
from zrun_core.tensor_parallel.fake_sums import looks_at_tokens, summed_over
from zrun_core.tensor_parallel.plan import TensorPlan, plan_model
from zrun_core.tensor_parallel.reads import NO_READS
from zrun_core.train.tensor_building import plan_tensors
from zrun_core.zero.wrap.fakes import fake_parameters

DIM = 32
ROLES = {"h.*.qkv": "fused 3", "h.*.out": "rowwise"}


class Attention(nn.Module):
    """Counts its heads by their width."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = 4
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(each, x) for each in self.qkv(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out

    def heads(self, q: Tensor, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, heads, T, H]."""
        return q.view(*q.shape[:2], -1, DIM // 4).transpose(1, 2)


class ByCount(Attention):
    """Counts its heads by an attribute; their width follows."""

    def heads(self, q: Tensor, x: Tensor) -> Tensor:
        return q.view(*q.shape[:2], self.n_head, -1).transpose(1, 2)


class ByInput(Attention):
    """Takes the width of its heads from its input, as nanoGPT does."""

    def heads(self, q: Tensor, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        return q.view(batch, length, self.n_head, dim // self.n_head).transpose(1, 2)


class Residual(Attention):
    """Adds its input to what its linears make."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class InList(Attention):
    """Gets its input in a list."""

    def forward(self, x: list[Tensor]) -> Tensor:
        return super().forward(x[0])


class ByWeight(Attention):
    """Uses the weight of its last linear without calling it."""

    def forward(self, x: Tensor) -> Tensor:
        _, _, v = self.qkv(x).chunk(3, dim=-1)
        return F.linear(v, self.out.weight, self.out.bias)


class NormOfHeads(Attention):
    """Normalises queries over all heads, without a weight."""

    def heads(self, q: Tensor, x: Tensor) -> Tensor:
        return super().heads(F.rms_norm(q, q.shape[-1:]), x)


class NormOfEachHead(Attention):
    """Normalises each head, with a weight that all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM // 4)

    def heads(self, q: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.norm(super().heads(q, x))
        return out


class Gated(Attention):
    """Scales what its heads come to by a number that it makes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        _, _, v = self.qkv(x).chunk(3, dim=-1)
        out: Tensor = self.out(v * self.gate(x).sigmoid())
        return out


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, DIM)
        self.h = nn.ModuleList(kind() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.h:
            x = block([x]) if isinstance(block, InList) else block(x)
        loss: Tensor = x.square().mean()
        return loss


def without_reads(plan: TensorPlan) -> TensorPlan:
    """Return a plan of which nothing is read whole, as one before its check."""
    assert not plan.reads.names
    return replace(plan, reads=NO_READS)


def checked(model: nn.Module, roles: Mapping[str, str] | None = None) -> TensorPlan:
    """Return the plan for 2 ranks, after the check."""
    ids = torch.zeros(2, 8, dtype=torch.int64)
    plan = plan_model(model, roles, 2)
    found = check_on_fakes(model, plan, lambda: model(ids), torch.float32, torch.device("cpu"))
    assert not found.note
    return found.plan


def entries(kind: type[Attention]) -> tuple[str, ...]:
    return checked(Net(kind), ROLES | {"*.n_head": "whole"}).regions[0].entries


def refused(kind: type[Attention], n_head: str = "whole") -> str:
    with pytest.raises(JobError) as error:
        checked(Net(kind), ROLES | {"*.n_head": n_head})
    return str(error.value)


@pytest.mark.parametrize(
    "model",
    [
        gpt("gpt2", vocab_size=50, dim=32, depth=2, heads=4, seq_len=16),
        gpt("llama", vocab_size=50, dim=32, depth=2, heads=4, kv_heads=2),
        bert(vocab_size=50, dim=32, depth=2, heads=4, seq_len=16),
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=51, n_embd=32, n_layer=2, n_head=4, n_positions=16)
        ),
        transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(
                vocab_size=50,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
            )
        ),
    ],
    ids=lambda model: type(model).__name__,
)
def test_models_that_zrun_knows_compute_the_same_with_slices(model: nn.Module) -> None:
    before = {name: (param, param.shape) for name, param in model.named_parameters()}
    assert without_reads(checked(model)) == plan_model(model, None, 2)
    for name, param in model.named_parameters():  # and stay as they were
        assert (param, param.shape) == before[name]


def test_a_region_begins_at_its_module_where_that_takes_nothing_else() -> None:
    assert entries(Attention) == ("h.0",)


@pytest.mark.parametrize("kind", [Residual, InList])
def test_it_begins_at_the_columns_where_gradients_go_around_them(kind: type[Attention]) -> None:
    assert entries(kind) == ("h.0.qkv",)


def test_heads_that_would_be_narrower_are_found() -> None:
    assert refused(ByCount) == (
        "parallel.tp: with the slices of h.0.qkv, scaled_dot_product_flash_attention_for_cpu in "
        "h.0 goes over 4 values in place of 8, which makes something else than the whole model; "
        'if it counts heads by an attribute ("h.*.n_head" is 4), write that one with divide in '
        "parallel.plan; if by the shape of its input, read it from what the linears make; or write "
        "h.0.qkv: whole, h.0.out: whole"
    )
    assert checked(Net(ByCount), ROLES | {"*.n_head": "divide"}).attributes == {
        "h.0.n_head": 2,
        "h.1.n_head": 2,
    }


class GroupedHeads(Attention):
    """Has query, key and value of a head one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], -1, 3, DIM // 4).permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class FewKeys(Attention):
    """Has 4 heads of queries, and 2 of keys and of values, in one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        made = self.qkv(x)
        q, k, v = torch.split(made, [each * made.shape[-1] // 4 for each in (2, 1, 1)], dim=-1)
        q, k, v = (self.heads(each, x) for each in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


@pytest.mark.parametrize(
    ("kind", "role", "columns", "own"),
    [
        (Attention, "fused 3", "columns 0 to 31, columns 32 to 63, columns 64 to 95", "0 to 47"),
        (FewKeys, "fused 2:1:1", "columns 0 to 31, columns 32 to 47, columns 48 to 63", "0 to 31"),
    ],
)
def test_fused_projections_need_their_sections(
    kind: type[Attention], role: str, columns: str, own: str
) -> None:
    """All shapes fit without, and ranks would take keys for queries."""
    roles = ROLES | {"*.n_head": "whole"}
    checked(Net(kind), roles | {"h.*.qkv": role})
    with pytest.raises(JobError) as error:
        checked(Net(kind), roles | {"h.*.qkv": "colwise"})
    assert str(error.value) == (
        f"parallel.plan: h.0 takes {columns} of what h.0.qkv makes apart, and as colwise rank 0 "
        f'has columns {own} of it; write "h.*.qkv": {role}, or h.0.qkv: whole and h.0.out: whole'
    )


def test_projections_that_are_grouped_by_head_are_not_fused() -> None:
    roles = ROLES | {"*.n_head": "whole"}
    checked(Net(GroupedHeads), roles | {"h.*.qkv": "colwise"})
    with pytest.raises(JobError) as error:
        checked(Net(GroupedHeads), roles)
    assert "and as fused rank 0 has columns 0 to 15 and 32 to 47 and 64 to 79" in str(error.value)


def test_whole_parameters_that_are_used_on_slices_are_summed() -> None:
    plan = checked(Net(NormOfEachHead), ROLES | {"*.n_head": "whole"})
    assert plan.summed == {"h.0.norm.weight", "h.1.norm.weight"}
    assert plan.regions[0].entries == ("h.0.qkv",)


def test_what_goes_around_the_columns_into_a_region_has_to_be_summed() -> None:
    assert refused(Gated) == (
        "parallel.plan: what h.0.out takes is made of the input of h.0 beside h.0.qkv too, where "
        'its gradient would be of slices; write "h.*.gate": summed'
    )
    plan = checked(Net(Gated), ROLES | {"*.n_head": "whole", "h.*.gate": "summed"})
    assert plan.regions[0].entries == ("h.0",)


def penalty_of(model: Net, wanted: str) -> Tensor:
    """The loss with a penalty on the gradient of what is in front of the blocks, or behind."""
    front = torch.zeros(2, 8, DIM, requires_grad=True)
    behind = model.h[1](model.h[0](front))
    inputs = {"front": front, "behind": behind}[wanted]
    out = behind.square() * torch.ones(DIM)
    (grad,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    loss: Tensor = out.mean() + grad.square().mean()
    return loss


def test_gradients_of_gradients_are_refused() -> None:
    """Before training; and where no forward without values has found them, at a border."""
    model = Net(Attention)
    plan = plan_model(model, ROLES | {"*.n_head": "whole"}, 2)
    device = torch.device("cpu")
    check = partial(check_on_fakes, model, plan, dtype=torch.float32, device=device)
    assert check(forward=lambda: penalty_of(model, "behind")).note == ""
    told = r"gradients of gradients, .* \(test_tensor_fakes.py:\d+\): write tp: 1"
    with pytest.raises(JobError, match=told):
        check(forward=lambda: penalty_of(model, "front"))
    x = torch.ones(2, requires_grad=True)
    crossed = cross(x, torch.clone, torch.clone).square().sum()
    torch.autograd.grad(crossed, x, retain_graph=True)
    with pytest.raises(JobError, match=told):
        torch.autograd.grad(crossed, x, create_graph=True)


def test_what_fails_without_values_is_told_once() -> None:
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    fails = nn.Linear(3, 3)
    without_values = fake_parameters(fails, torch.float32, torch.device("cpu"))
    with without_values, pytest.raises(RuntimeError, match="broadcast"):
        _ = fails.bias + torch.ones(2)
    logger.removeHandler(handler)
    assert logged == []


def test_norms_of_slices_are_found() -> None:
    assert "mean in h.0 goes over 16 values in place of 32" in refused(NormOfHeads)


@pytest.mark.parametrize("n_head", ["whole", "divide"])
def test_shapes_that_are_read_from_the_input_are_refused_where_they_are(n_head: str) -> None:
    message = refused(ByInput, n_head)
    assert "with the slices of h.0.qkv the forward of h.0 fails at " in message
    assert "test_tensor_fakes.py:" in message
    assert "is invalid for input of size 256" in message
    assert "read " in message


def test_a_weight_that_is_used_without_its_linear_is_refused() -> None:
    assert refused(ByWeight) == (
        "parallel.plan: h.0.out is not called after h.0.qkv, so nothing sums what ranks have: its "
        "weight is used otherwise than by calling it, or the column linear is called for something "
        "else too; write h.0.qkv: whole, h.0.out: whole"
    )


def test_lengths_of_sequences_are_checked_before_the_start() -> None:
    model = gpt("gpt2", vocab_size=50, dim=32, depth=2, heads=4, seq_len=16)
    parallel = ParallelConfig(tp=2, sequence=True)

    def plan(length: int) -> TensorPlan | None:
        ids = torch.zeros(2, length, dtype=torch.int64)
        device = torch.device("cpu")
        found, notes = plan_tensors(model, parallel, lambda: model(ids), torch.float32, device)
        assert not notes
        return found

    assert without_reads(plan(16)) == plan_model(model, None, 2)
    with pytest.raises(JobError) as error:
        plan(15)
    assert str(error.value) == (
        "parallel.sequence: blocks.0 is given a sequence of 15, and 15 / tp 2 = 7.5 is not whole: "
        "make samples of a length that 2 divides, pad them (data.collate), or write sequence: false"
    )


class Experts(nn.Module):
    """Packed: every token goes to all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(3, 2 * DIM, DIM))
        self.down = nn.Parameter(torch.ones(3, DIM, 2 * DIM))
        self.bias = nn.Parameter(torch.zeros(3, DIM))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1).expand(3, -1, -1)
        made = F.gelu(tokens @ self.up.transpose(1, 2)) @ self.down.transpose(1, 2)
        return (made + self.bias[:, None]).sum(0).view_as(x)


EXPERTS = {"h.*": "experts", "h.*.up": "colwise", "h.*.down": "rowwise", "h.*.bias": "once"}


def test_experts_of_your_own_are_a_region_that_is_summed() -> None:
    plan = checked(Net(Experts), EXPERTS)
    assert plan.regions[0].entries == ("h.0",)
    assert plan.parts(0)["h.0.up"].local_shape == (3, DIM, DIM)
    assert plan.parts(0)["h.0.down"].local_shape == (3, DIM, DIM)
    assert "h.0.bias" in plan.summed


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.TransformerEncoderLayer(DIM, 4, DIM, 0.0, batch_first=True), ""),
        (nn.Sequential(nn.Linear(DIM, DIM), nn.Conv1d(8, 8, 3, padding=1)), "convolution"),
        (nn.Sequential(nn.Linear(DIM, DIM), nn.Softmax(dim=1)), "softmax"),
        (nn.Sequential(nn.Linear(DIM, DIM), nn.Softmax(dim=-1)), ""),
    ],
    ids=["attention", "convolution", "over tokens", "over widths"],
)
def test_blocks_that_mix_tokens_cannot_have_slices_of_the_sequence(
    layer: nn.Module, message: str
) -> None:
    model = Net(Attention)
    model.h = nn.ModuleList([layer, nn.TransformerEncoderLayer(DIM, 4, DIM, batch_first=True)])
    ids = torch.zeros(2, 8, dtype=torch.int64)

    plan = plan_model(model, None, 2)
    device, blocks = torch.device("cpu"), ["h.0", "h.1"]
    found = ""
    try:
        check_on_fakes(model, plan, lambda: model(ids), torch.float32, device, blocks)
    except JobError as error:
        found = str(error)
    said = (
        f"parallel.sequence: {message} in h.0 looks at several tokens outside of what "
        "parallel.plan divides, where each rank has a slice of the sequence: write sequence: false"
    )
    assert found == (said if message else "")


def test_what_mixes_tokens_behind_a_value_that_is_read_is_found() -> None:
    class Mixing(nn.TransformerEncoderLayer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.mean()

    class Leaving(nn.Module):
        def __init__(self, last: type[nn.Module]) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, DIM)
            kinds = (nn.TransformerEncoderLayer, last)
            self.h = nn.ModuleList(kind(DIM, 4, DIM, 0.0, batch_first=True) for kind in kinds)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.h[0](self.embed(ids))
            while not x.abs().max() > 0:  # where it is False each time, as long as that may be
                x = self.h[1](x) if x.isfinite().all() else self.h[1](x) * 2
            return x.sum()

    def check(last: type[nn.Module]) -> str:
        model = Leaving(last)
        ids = torch.zeros(2, 8, dtype=torch.int64)
        plan = plan_model(model, None, 2)
        device, blocks = torch.device("cpu"), ["h.0", "h.1"]
        return check_on_fakes(model, plan, lambda: model(ids), torch.float32, device, blocks).note

    with pytest.raises(JobError, match=r"parallel.sequence: mean in h.1 looks at several tokens"):
        check(Mixing)
    assert check(nn.TransformerEncoderLayer).startswith("parallel.tp: not checked before training")


@pytest.mark.parametrize("by", ["nonzero", "masked_select", "index"])
def test_blocks_that_pick_tokens_by_values_cannot_have_slices_of_the_sequence(by: str) -> None:
    """Ranks would pick as many as their slices have, and wait for each other to pick as many."""

    class Picking(nn.TransformerEncoderLayer):
        def forward(self, x: Tensor) -> Tensor:
            scores = x[..., 0]
            mask = scores > 0
            picked = {
                "nonzero": lambda: scores[mask.nonzero(as_tuple=True)],
                "masked_select": lambda: scores.masked_select(mask),
                "index": lambda: scores[mask],
            }
            return super().forward(x) + picked[by]().sum()

    model = Net(Attention)
    model.h = nn.ModuleList(Picking(DIM, 4, DIM, 0.0, batch_first=True) for _ in range(2))
    ids = torch.zeros(2, 8, dtype=torch.int64)
    plan, device = plan_model(model, None, 2), torch.device("cpu")

    def check(blocks: list[str]) -> str:
        forward = partial(model, ids)
        return check_on_fakes(model, plan, forward, torch.float32, device, blocks).note

    with pytest.raises(JobError, match=r"parallel.sequence: \w+ in h.0 looks at several tokens"):
        check(["h.0", "h.1"])
    assert "not checked before training" in check([])


def test_medians_of_slices_are_found() -> None:
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            return self.down(h * (h >= h.median(-1, keepdim=True).values))

    with pytest.raises(JobError, match=r"median in h.0 goes over .* values in place of "):
        checked(Net(Halved), {"*.up": "colwise", "*.down": "rowwise"})


@pytest.mark.parametrize(
    ("operation", "size", "mixes"),
    [
        (lambda x: x.median(-1), 4, False),
        (lambda x: x.median(1), 3, True),
        (lambda x: x.median(), 24, True),
        (lambda x: x.nanmedian(), 24, True),
        (lambda x: x.cummax(1), 3, True),
        (lambda x: x.kthvalue(2, -1), 4, False),
        (lambda x: x.kthvalue(2, 1), 3, True),
        (lambda x: x.mode(-1), 4, False),
        (lambda x: x.logcumsumexp(1), 3, True),
        (lambda x: x.aminmax(), 24, True),
    ],
)
def test_over_how_many_values_an_operation_goes(
    operation: Callable[[Tensor], object], size: int, mixes: bool
) -> None:
    found: list[tuple[list[int], bool]] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            found.append((list(summed_over(name, args, out)), looks_at_tokens(name, args, out)))
            return out

    x = torch.rand(2, 3, 4)
    with Seen():
        operation(x)
    assert ([size], mixes) in found


def test_a_model_that_looks_at_values_is_mended_and_noted_once() -> None:
    class Looking(Net):
        def forward(self, ids: Tensor) -> Tensor:
            loss = super().forward(ids)
            return loss * 2 if loss.item() > 0 else loss

    model = Looking(Residual)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    parallel = ParallelConfig(tp=2, plan=ROLES | {"*.n_head": "whole"})
    forward = partial(model, ids)
    plan, notes = plan_tensors(model, parallel, forward, torch.float32, torch.device("cpu"))
    unmended = plan_model(model, parallel.plan, 2)
    regions = tuple(replace(each, entries=each.columns) for each in unmended.regions)
    assert regions != unmended.regions  # its blocks add their input
    assert plan == replace(unmended, regions=regions)
    (note,) = notes
    assert note.startswith(
        "parallel.tp: not checked before training that ranks with slices compute what the whole "
        "model does: without values its forward fails at "
    )
    assert "test_tensor_fakes.py:" in note
