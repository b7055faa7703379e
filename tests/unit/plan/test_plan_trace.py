"""Models are traced without memory, deep ones through few of their blocks, and apart from us."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plan_models
import pytest
import torch
from plan_rows import events_of, ops_of
from torch import nn
from torch.utils.flop_counter import flop_registry
from warm import WarmPopen

from zrun_core.errors import JobError, UserCodeError
from zrun_core.models.bert import bert
from zrun_core.models.gpt import gpt
from zrun_core.plan.trace import allocation_probe, trace_process
from zrun_core.plan.trace.affine import fit_loops
from zrun_core.plan.trace.block_extrapolation import alike
from zrun_core.plan.trace.module_tree import describe_modules, describe_params, skeleton_of
from zrun_core.plan.trace.parameters_only import with_bounds
from zrun_core.plan.trace.peak import peak_of
from zrun_core.plan.trace.profile import Profile, Trace
from zrun_core.plan.trace.rows import Affine, Rows, RowWriter, TracePhase, Vocabulary
from zrun_core.plan.trace.trace_process import trace_in_subprocess, trace_job
from zrun_core.spine.config import JobConfig
from zrun_core.zero.wrap.auto_wrap import auto_wrap

HERE = Path(plan_models.__file__).parent
GPT = "zrun_core.models.gpt:gpt"
TEXT = {"call": "zrun_core.data.text:text", "args": {"paths": "nothing-matches-*", "seq_len": 32}}


def job(model: str, data: Any = "plan_models.py:Vectors", **keys: Any) -> JobConfig:
    call, args = (model, {}) if isinstance(model, str) else model
    keys = {"steps": 1, "batch": {"global": 4, "micro": 4}, **keys}
    return JobConfig.model_validate(
        {"name": "t", "model": {"call": call, "args": args}, "data": data, **keys}
    )


def traced(model: Any, *policies: str, **keys: Any) -> Profile:
    return trace_job(job(model, **keys), HERE, micros=(4,), checkpoints=policies or ("none",))


def test_a_linear_model_to_the_byte() -> None:
    profile = traced(("plan_models.py:Deep", {"depth": 2}))
    assert (profile.source, profile.why, profile.num_blocks) == ("traced", "", 2)
    assert not profile.follows_values
    assert profile.batch_bytes.at(3) == 3 * 4 * (16 + 1)
    # fp32, per sample: input of layers 16 and 16; relu's output 32 each, which `up` also made: 2 x
    # (32 + 32 freed).
    at_loss = [
        event
        for event in events_of(profile.traces["none"])
        if event.alloc and event.phase == "forward"
    ]
    assert [event.size.at(1) for event in at_loss[:4]] == [64, 128, 128, 64]
    assert all(event.size.base == 0 for event in at_loss)


@pytest.mark.thorough
def test_what_cannot_be_counted_ends_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> int:
        raise AssertionError("shapes are incompatible")

    for packet in (torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.convolution):
        monkeypatch.setitem(flop_registry, packet, fails)
    deep = ("plan_models.py:Deep", {"depth": 2})
    profile = traced(deep)
    assert profile.source == "traced"
    (note,) = [note for note in profile.notes if "cannot count" in note]
    why = "addmm (AssertionError: shapes are incompatible)"
    assert note == f"times are too short: torch {torch.__version__} cannot count {why}"
    assert profile.flow is not None
    assert profile.flow.uncounted in note
    assert Profile.from_json(profile.to_json()).flow == profile.flow
    monkeypatch.undo()
    assert not traced(deep).notes
    found = peak_of(traced(deep).traces["none"], 4, steady={})
    assert peak_of(profile.traces["none"], 4, steady={}) == found


@pytest.mark.parametrize(
    ("style", "policies"),
    [
        ("plain", ("none", "every_n", "selective")),
        ("collects", ("full",)),
        ("indexed", ("none",)),
        ("skips", ("none",)),
    ],
)
@pytest.mark.at_most(1)
def test_blocks_that_did_not_run_are_written_out(
    style: str, policies: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ("plan_models.py:Deep", {"depth": 12, "style": style})
    few = traced(model, *policies)
    monkeypatch.setattr("zrun_core.plan.trace.tracer.find_series", lambda *_: [])
    full = traced(model, *policies)
    for policy in policies:
        assert alike(few.traces[policy].events, full.traces[policy].events)
        assert alike(few.traces[policy].ops, full.traces[policy].ops)
        assert few.traces[policy].modules == full.traces[policy].modules
        assert few.traces[policy].operators == full.traces[policy].operators


def test_few_blocks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Counter[int]()
    forward = plan_models.Layer.forward

    def counted(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        calls[id(self)] += 1
        return forward(self, x)

    monkeypatch.setattr(plan_models.Layer, "forward", counted)
    traced(("plan_models.py:Deep", {"depth": 40}), "none", "full")
    assert len(calls) == 40, "all of them are followed, once"
    assert sum(count > 1 for count in calls.values()) < 8


@pytest.mark.thorough
def test_recomputing_costs_flops_and_saves_memory() -> None:
    model = (GPT, {"flavour": "llama", "dim": 32, "depth": 2, "heads": 2, "seq_len": 32})
    profile = traced(model, "none", "selective", "full", data=TEXT, precision="bf16")
    assert (profile.source, profile.notes) == (
        "traced",
        (),
    )  # there is no text: its seq_len says its shape
    none, selective, full = (profile.traces[name] for name in ("none", "selective", "full"))
    peaks = [
        peak_of(trace_process, 4, steady={}).num_bytes for trace_process in (full, selective, none)
    ]
    assert peaks == sorted(set(peaks))
    flops = [
        sum(op.flops.at(4) for op in ops_of(trace_process))
        for trace_process in (none, selective, full)
    ]
    assert flops[0] == flops[1] < flops[2]
    assert profile.tokens_per_sample == 32
    assert {event.kind for event in events_of(none)} == {"activation", "temp", "grad"}


def test_values_decide() -> None:
    profile = traced("plan_models.py:Looks")
    assert profile.source == "measured on the CPU"
    assert "fake tensors" in profile.why
    assert profile.follows_values
    assert peak_of(profile.traces["none"], 4, steady={}).num_bytes > 0


def test_what_a_recurrent_layer_runs_has_a_price_of_its_own() -> None:
    """Nine operators for each position in forward, all of one call; Python calls the others."""

    def num_inner(positions: int) -> tuple[int, int]:
        profile = traced(("plan_models.py:Gated", {"positions": positions}))
        assert Profile.from_json(profile.to_json()) == profile
        trace = profile.traces["none"]
        inner = np.array([each.is_inner for each in trace.operators])
        names = {
            trace.modules[number] for number in trace.ops["module"][inner[trace.ops["operator"]]]
        }
        assert names == {"gru"}
        count = int(inner[trace.ops["operator"]].sum())
        return count, len(trace.ops) - count

    few, of_python = num_inner(6)
    many, as_before = num_inner(12)
    assert as_before == of_python
    assert many - few > 6 * 15


def test_an_evaluation_is_followed_without_what_backward_would_need() -> None:
    deep = ("plan_models.py:Deep", {"depth": 6})
    held_out = {"data": "plan_models.py:Vectors", "every": 1}
    assert traced(deep).evaluation_bytes.at(4) == 0
    plain = traced(deep, eval=held_out)
    in_training = peak_of(plain.traces["none"], 4, steady={}).num_bytes
    in_evaluation = plain.evaluation_bytes.at(4)
    assert in_evaluation > plain.batch_bytes.at(4)
    assert in_evaluation < in_training / 2
    assert plain.traces == traced(deep).traces, "dropout and statistics are as they were"
    assert Profile.from_json(plain.to_json()).evaluation_bytes == plain.evaluation_bytes


def test_evaluations_take_what_their_data_and_metrics_do() -> None:
    deep = ("plan_models.py:Deep", {"depth": 2})
    metrics = {"data": "plan_models.py:Vectors", "metrics": "plan_models.py:hungry_metrics"}
    profile = traced(deep, eval=metrics)
    # A table of 1 MiB for each sample, its difference to y, and the absolute values of that.
    assert profile.evaluation_bytes.per_sample == pytest.approx(3 << 20, rel=0.35)
    broken = traced(deep, eval={**metrics, "metrics": "plan_models.py:broken_metrics"})
    assert broken.evaluation_bytes.at(4) == 0
    (note,) = broken.notes
    assert note.startswith("eval.data is not planned: ")
    assert "no such column" in note


def test_text_that_hooks_make_is_followed_and_others_are_named() -> None:
    sizes = {"vocab_size": 512, "dim": 32, "depth": 2, "heads": 2, "seq_len": 128}
    text = {"data": {"call": "zrun_core.data.text:text", "args": {"seq_len": 128}}}
    model = ("zrun_core.models.gpt:gpt", sizes)
    sample = "zrun_core.models.generate:sample"

    def hooked(**hooks: Any) -> Profile:
        return traced(model, **text, hooks=hooks)

    plain = hooked()
    assert (plain.generation_bytes, plain.hooks_gather) == (0, False)
    short, long = (
        hooked(on_eval={"call": sample, "args": {"num_tokens": number}}) for number in (8, 100)
    )
    # Logits of 64 and of 128 tokens, which the padding of lengths makes, and little else.
    assert short.generation_bytes > 64 * 512 * 4
    logits = (128 - 64) * 512 * 4
    assert logits < long.generation_bytes - short.generation_bytes < 1.5 * logits
    assert long.hooks_gather
    assert long.traces == plain.traces
    assert not any("hooks" in note for note in long.notes)
    assert Profile.from_json(long.to_json()) == long
    own = hooked(on_step="plan_models.py:look", on_end="plan_models.py:Gathering")
    assert (own.generation_bytes, own.hooks_gather) == (0, True)
    (note,) = [note for note in own.notes if "hooks" in note]
    assert note.startswith("what hooks.on_step and hooks.on_end allocate is not in this estimate")


def runs_lstm_in_bf16() -> bool:
    """Return whether torch's LSTM runs under autocast here: oneDNN's wants AVX-512 for bf16."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(4, 4)(torch.ones(1, 1, 4))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["Recurrent", "Lookups"])
@pytest.mark.at_most(1)
def test_what_is_foretold_is_what_runs(model: str, precision: str) -> None:
    if (model, precision) == ("Recurrent", "bf16") and not runs_lstm_in_bf16():
        pytest.skip("torch has no LSTM in bf16 for this CPU")
    asked = job(f"plan_models.py:{model}", precision=precision)
    fake, real = (trace_job(asked, HERE, micros=(4,), mode=mode) for mode in ("fake", "values"))
    assert (fake.source, real.source) == ("traced", "measured on the CPU")
    peaks = [peak_of(each.traces["none"], 4, steady={}).num_bytes for each in (fake, real)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


def test_not_linear_in_the_batch() -> None:
    profile = traced("plan_models.py:Square")
    trace_process = profile.traces["none"]
    assert profile.source == "traced"
    assert set(trace_process.exact) == {4}
    largest = max(event.size.at(4) for event in events_of(trace_process.of(4)))
    assert largest == 4 * max(4 * 16, 16 * 16)
    assert any("not linear" in note for note in profile.notes)


@pytest.mark.thorough
def test_a_loss_in_chunks_runs_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    args = {"dim": 32, "depth": 2, "heads": 2, "seq_len": 32, "vocab_size": 512, "loss_chunk": 8}
    profile = traced((GPT, args), data=TEXT)
    lines = profile.traces["none"]
    assert (dict(lines.exact), len(profile.notes)) == ({}, 0)
    monkeypatch.setattr("zrun_core.plan.trace.tracer.fit_loops", lambda *_: None)
    followed = traced((GPT, args), data=TEXT)
    assert any("what runs depends on the micro-batch" in note for note in followed.notes)
    exact = followed.traces["none"].exact[4]
    flops = [
        sum(op.flops.at(4) for op in ops_of(trace_process)) for trace_process in (lines, exact)
    ]
    peaks = [peak_of(trace_process, 4, steady={}).num_bytes for trace_process in (lines, exact)]
    assert flops[0] == pytest.approx(flops[1], rel=1e-3)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


@pytest.mark.parametrize("end", [TracePhase.FORWARD, TracePhase.BACKWARD])
def test_what_is_more_in_the_larger_pass_has_no_size_in_the_smaller_one(end: TracePhase) -> None:
    """Also where a loop of the backward pass frees what one of the forward pass has kept."""
    vocabulary = Vocabulary()

    def loop(count: int) -> Rows:  # each time around: 8 bytes stay, 100 go again
        writer = RowWriter(vocabulary)

        def write(
            tensor: int,
            size: int,
            module: str,
            phase: TracePhase = TracePhase.FORWARD,
            *,
            alloc: bool,
        ) -> None:
            where = {"phase": phase, "module": module, "block": -1}
            writer.event(tensor, size, alloc=alloc, **where)  # type: ignore[arg-type]

        write(0, 10 * count, "in", alloc=True)
        for number in range(count):
            kept, scratch = 1 + 2 * number, 2 + 2 * number
            write(scratch, 100, "loop", alloc=True)
            write(kept, 8, "kept", alloc=True)
            write(scratch, 100, "loop", alloc=False)
        total = 1 + 2 * count
        write(total, 0, "sum", alloc=True)
        for number in range(count):
            write(total + 1 + number, 100, "end", end, alloc=True)
            write(1 + 2 * number, 8, "end", end, alloc=False)
            write(total + 1 + number, 100, "end", end, alloc=False)
        write(total, 0, "sum", end, alloc=False)
        return writer.rows()

    rows = fit_loops(loop(2), 2, loop(4), 4, vocabulary)
    assert rows is not None
    trace_of_loops = Trace.of_rows("none", rows, vocabulary)
    for micro in (2, 3, 4, 8):
        assert peak_of(trace_of_loops, micro, steady={}).num_bytes == 10 * micro + 8 * micro + 100
    assert fit_loops(loop(4), 4, loop(2), 2, vocabulary) is None


def test_what_a_convolution_allocates_inside() -> None:
    x, weight = torch.zeros(2, 16, 8, 8), torch.zeros(16, 16, 3, 3)
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = torch.ops.aten.convolution(*args)
    inside = allocation_probe.allocations(torch.ops.aten.convolution.default, args, {}, out)
    assert sum(inside) == out.nbytes  # the rest was given up
    assert inside.count(out.nbytes) >= 1
    assert allocation_probe.allocations(torch.ops.aten.mm.default, args, {}, out) == ()


def test_what_a_product_of_16_bits_allocates_inside() -> None:
    operands = [
        torch.zeros(16, 256, dtype=torch.bfloat16),
        torch.zeros(256, 64, dtype=torch.bfloat16),
    ]
    product = torch.ops.aten.mm.default
    out = product(*operands)
    assert allocation_probe.allocations(product, operands, {}, out) == ()
    inside = allocation_probe.allocations(product, operands, {}, out, products=True)
    assert sum(inside) == out.nbytes  # the rest, if there is any on this processor, was given up
    profile = traced("plan_models.py:Deep", "none", "full", precision="bf16")
    assert [set(profile.traces[policy].exact) for policy in ("none", "full")] == [{4}, set()]
    plain = replace(profile.traces["none"], exact={})
    peaks = [
        peak_of(trace_process, 4, steady={}).num_bytes
        for trace_process in (plain, profile.traces["none"])
    ]
    scratch = max(
        sum(size for size in found if size > 0) for found in allocation_probe._found.values()
    )
    assert 0 <= peaks[1] - peaks[0] <= scratch


@pytest.mark.parametrize(
    "model",
    [
        lambda: gpt(dim=32, depth=3, heads=2, vocab_size=64),
        lambda: bert(dim=32, depth=3, heads=2, vocab_size=64),
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2)
        ),
    ],
)
def test_a_skeleton_is_cut_as_the_model_is(model: Any) -> None:
    with torch.device("meta"):
        built = model()
    next(iter(built.parameters())).requires_grad_(False)
    params, modules = describe_params(built, torch.bfloat16), describe_modules(built)
    described = Profile("states alone", "", params, 0, 0, Affine(0.0, 0.0), None, {}, modules)
    skeleton = skeleton_of(Profile.from_json(described.to_json()))
    for options in ({}, {"persist_below": 200}, {"whole_blocks": True}):
        one, other = (
            auto_wrap(each, dtype=torch.bfloat16, num_shards=3, bucket=1 << 12, **options)
            for each in (built, skeleton)
        )
        assert [unit.layout for unit in one.units] == [unit.layout for unit in other.units]
        assert [indices for _, indices, _ in one.hooked] == [
            indices for _, indices, _ in other.hooked
        ]


# In a process of its own


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "zrun" / "profiles"


def ask(model: Any, timeout_s: float = 60.0) -> Profile:
    return trace_in_subprocess(job(model), HERE, micros=(4,), timeout_s=timeout_s)


@pytest.mark.thorough
def test_cuda_keeps_other_things_and_what_was_found_holds_until_the_code_changes(
    cache: Path, tmp_path: Path
) -> None:
    code = tmp_path / "mine.py"
    code.write_text(
        "from zrun_core.models.gpt import gpt\n\n\ndef model():\n"
        "    return gpt(flavour='llama', dim=32, depth=1, heads=2, seq_len=32)\n"
    )
    asked = job("mine.py:model", data=TEXT, precision="bf16")

    def found() -> Profile:
        return trace_in_subprocess(asked, tmp_path, micros=(4,), device="cuda", timeout_s=60)

    first = found()
    assert (first.source, first.device) == ("traced", "cuda")
    names = {op.name for op in first.traces["none"].operators}
    assert "_scaled_dot_product_flash_attention[causal]" in names
    assert "_scaled_dot_product_flash_attention_for_cpu" not in names
    norms = [
        op for op in ops_of(first.traces["none"]) if op.module == "norm" and op.phase == "forward"
    ]
    assert all(op.name not in ("rsqrt", "mean", "pow") for op in norms)  # in one kernel

    (kept,) = cache.glob("*.json")
    assert (kept.stat().st_mode & 0o777, cache.stat().st_mode & 0o777) == (0o600, 0o700)
    text = kept.read_text()
    kept.write_text(json.dumps(json.loads(text) | {"why": "kept"}))
    assert found() == replace(first, why="kept")
    kept.write_text(text[:100])
    assert trace_process._stored(kept) is None
    kept.write_text(text)
    assert trace_process._stored(kept) == first
    code.write_text(code.read_text().replace("depth=1", "depth=2"))
    assert trace_process._stored(kept) is None


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes have torch from the start; those of the test above import it."""
    monkeypatch.setattr(subprocess, "Popen", WarmPopen)


@pytest.mark.parametrize(
    ("how", "said"), [("exit", "SystemExit: 3"), ("raise", "this model has a mistake")]
)
@pytest.mark.at_most(1)
def test_a_model_that_does_not_run_is_described(how: str, said: str) -> None:
    profile = traced(("plan_models.py:Ends", {"how": how}))
    assert (profile.source, dict(profile.traces)) == ("states alone", {})
    assert said in profile.why
    assert profile.num_params == 16 * 16 + 16 + 17
    bound = with_bounds(profile, ("none", "full"))
    assert [*bound.traces] == ["none", "full"]
    steady = dict.fromkeys(TracePhase, 7)
    assert peak_of(bound.traces["none"], 4, steady=steady).num_bytes == 7
    assert not ops_of(bound.traces["none"])


@pytest.mark.usefixtures("warm")
@pytest.mark.thorough
def test_so_is_one_that_ends_its_process(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_process, "_MODES", ("fake",))  # a process less
    profile = ask(("plan_models.py:Ends", {"how": "abort"}))
    assert (profile.source, profile.num_params) == ("states alone", 16 * 16 + 16 + 17)
    assert "signal 6" in profile.why


def test_traces_of_other_threads_are_ended_and_not_kept(cache: Path) -> None:
    asked = job(("plan_models.py:Ends", {"how": "hang"}))
    said: list[str] = []

    def trace() -> None:
        try:
            trace_in_subprocess(asked, HERE, micros=(4,), timeout_s=100)
        except UserCodeError as error:
            said.append(str(error))

    threads = [threading.Thread(target=trace) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while len(trace_process._under_way) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(trace_process._under_way) == 2
    trace_process.end_all()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert not trace_process._under_way
    assert len(said) == 2
    assert not list(cache.glob("*.json"))


@pytest.mark.usefixtures("warm")
def test_one_that_ends_its_process_without_values_runs_with_them(cache: Path) -> None:
    profile = ask(("plan_models.py:Ends", {"how": "abort without values"}))
    assert (profile.source, [*profile.traces]) == ("measured on the CPU", ["none"])
    assert "ended with signal 6" in profile.why
    assert peak_of(profile.traces["none"], 4, steady={}).num_bytes > 4 * 4 * 16


@pytest.mark.usefixtures("warm")
@pytest.mark.thorough
def test_and_one_that_hangs(cache: Path) -> None:
    profile = ask(("plan_models.py:Ends", {"how": "hang"}), timeout_s=7)
    assert (profile.source, profile.num_params) == ("states alone", 16 * 16 + 16 + 17)
    said = r"running plan_models.py:Ends .* did not finish within 7 s: .*--patience"
    assert re.match(said, profile.why)
    assert not list(cache.glob("*.json"))  # with more time there is more to know


@pytest.mark.usefixtures("warm")
@pytest.mark.thorough
def test_data_that_never_come_leave_what_the_parameters_tell(cache: Path) -> None:
    asked = job("plan_models.py:Deep", data="plan_models.py:Hangs")
    profile = trace_in_subprocess(asked, HERE, micros=(4,), timeout_s=7)
    assert (profile.source, profile.num_blocks, profile.is_partial) == ("states alone", 12, True)
    assert profile.why.startswith(
        "reading the first samples of plan_models.py:Hangs did not finish"
    )


@pytest.mark.parametrize("policies", [("none", "full", "selective"), ("full", "none", "selective")])
@pytest.mark.thorough
def test_a_policy_that_the_model_cannot_bear_leaves_the_others_alone(
    policies: tuple[str, ...],
) -> None:
    profile = traced(("plan_models.py:Deep", {"style": "once"}), *policies)
    assert (profile.source, profile.why, [*profile.traces]) == ("traced", "", ["none"])
    assert set(profile.untraced) == {"full", "selective"}
    assert all("this layer runs once" in why for why in profile.untraced.values())
    bound = with_bounds(profile, policies[:1])
    is_known = policies[0] == "none"
    assert bool(events_of(bound.traces[policies[0]])) == is_known
    assert bound.source_of(policies[0]) == ("traced" if is_known else "states alone")


@pytest.mark.usefixtures("warm")
def test_mistakes_are_errors(cache: Path) -> None:
    with pytest.raises(JobError, match="did you mean Deep"):
        ask("plan_models.py:Dep")
    assert not list(cache.glob("*.json"))
    with pytest.raises(UserCodeError, match="no such weights"):
        traced("plan_models.py:never")
