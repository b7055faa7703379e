"""Races are named where the second access is asked for, and stalls are told of."""

from __future__ import annotations

import json
import re
import textwrap

import pytest
from scripts import run

HEAD = """
import torch, simulated_gpu
from simulated_gpu import python_kernels
side, main = torch.cuda.Stream(), torch.cuda.current_stream()
x = torch.zeros(1000, device="cuda")
pinned = torch.zeros(1000).pin_memory()
torch.cuda.synchronize()
def aside(call):
    with torch.cuda.stream(side):
        return call()
"""


RACES = {
    "read what another stream writes": (
        "aside(lambda: x.add_(1)); x * 2",
        r"aten::mul .* reads on the default stream.* what aten::add_? .* writes on stream 1",
    ),
    "write what another stream reads": (
        "aside(lambda: x * 2); x.add_(1)",
        r"aten::add_? .* writes on the default stream .* what aten::mul .* reads on stream 1",
    ),
    "write what another stream writes": (
        "aside(lambda: x.zero_()); x.zero_()",
        r"aten::zero_ .* writes on the default stream .* aten::zero_ .* writes on stream 1",
    ),
    "wait for an earlier place": (
        "event = torch.cuda.Event(); aside(event.record); aside(lambda: x.add_(1)); "
        "main.wait_event(event); x * 2",
        r"aten::mul .* reads .* what aten::add_? .* writes",
    ),
    "let go of what another stream reads": (
        "y = x * 2; side.wait_stream(main); aside(lambda: y + 1); del y",
        r"the end of memory .* writes on the default stream .* what aten::add .* reads on stream 1",
    ),
    "use what was made on another stream": (
        "y = aside(lambda: torch.ones(9, device='cuda')); y + 1",
        r"aten::add .* reads .* aten::fill_ .* writes on stream 1",
    ),
    "overlapping columns": (
        "m = x[:900].view(30, 30); aside(lambda: m[:, :16].zero_()); m[:, 15:].zero_()",
        r"aten::zero_ .* \(60 bytes\)",
    ),
    "the host reads what is copied there": (
        "pinned.copy_(x, non_blocking=True); pinned.sum()",
        r"aten::sum .* reads on the host what copy_ .* writes on the default stream",
    ),
    "the host writes what is yet to be copied": (
        "x.copy_(pinned, non_blocking=True); pinned.zero_()",
        r"aten::zero_ .* writes on the host what copy_ .* reads on the default stream",
    ),
    "the host waits for another stream": (
        "aside(lambda: x.add_(1)); main.synchronize(); x.sum().item()",
        r"aten::sum .* reads .* aten::add_? .* writes on stream 1",
    ),
    "a kernel of Python": (
        "aside(lambda: python_kernels.launch(lambda _: None, writes=[x[:3]], name='ours')); x * 2",
        r"aten::mul .* ours .* writes on stream 1 .*\(4000 bytes\)",
    ),
    "a storage of another size": (
        "y = x * 2; aside(lambda: y.add_(1)); y.untyped_storage().resize_(8000)",
        r"resize_ .* reads .* aten::add_? .* writes on stream 1",
    ),
}


@pytest.fixture(scope="module")
def noted() -> dict[str, list[str]]:
    """The first lines of the races of each script, by its name."""
    scripts = {**{name: script for name, (script, _) in RACES.items()}, **ORDERED}
    source = HEAD + textwrap.dedent(
        f"""
        import json
        found = {{}}
        for name, script in {scripts!r}.items():
            exec(script)
            found[name] = [race.splitlines()[0] for race in simulated_gpu.races()]
            torch.cuda.synchronize()
            simulated_gpu.clear_races()
        print(json.dumps(found))
        """
    )
    said: dict[str, list[str]] = json.loads(run(source, devices=1, races=1, delay_us=100))
    return said


@pytest.mark.parametrize("name", RACES)
def test_a_race_is_named(noted: dict[str, list[str]], name: str) -> None:
    pattern = RACES[name][1]
    assert any(re.search(pattern, race) for race in noted[name]), noted[name]


ORDERED = {
    "a wait for the stream": "aside(lambda: x.add_(1)); main.wait_stream(side); x * 2",
    "an event": (
        "aside(lambda: x.add_(1)); event = torch.cuda.Event(); event.record(side); "
        "main.wait_event(event); x * 2"
    ),
    "by way of a third stream": (
        "third = torch.cuda.Stream(); aside(lambda: x.add_(1)); third.wait_stream(side); "
        "main.wait_stream(third); x * 2"
    ),
    "the host waits": "aside(lambda: x.add_(1)); side.synchronize(); x * 2",
    "the host has seen that it is over": (
        "aside(lambda: x.add_(1)); event = torch.cuda.Event(); event.record(side)\n"
        "while not event.query(): pass\n"
        "x * 2"
    ),
    "two that read": "aside(lambda: x * 2); x * 3",
    "other columns": (
        "m = x[:900].view(30, 30); aside(lambda: m[:, :16].zero_()); m[:, 16:].zero_()"
    ),
    "a copy that the host waits for": (
        "pinned.copy_(x, non_blocking=True); main.synchronize(); pinned.sum(); pinned.zero_()"
    ),
    "what only looks at shapes": (
        "pinned.copy_(x, non_blocking=True); pinned[3:].view(torch.int32); "
        "torch.empty_like(pinned); main.synchronize()"
    ),
    "record_stream": (
        "y = x * 2; side.wait_stream(main); aside(lambda: y + 1); y.record_stream(side); del y\n"
        "for _ in range(50): x * 2\n"
    ),
}


@pytest.mark.parametrize("name", ORDERED)
def test_what_is_ordered_is_none(noted: dict[str, list[str]], name: str) -> None:
    assert noted[name] == []


def test_a_race_is_an_error_with_both_places() -> None:
    script = """
        def writer():
            x.add_(1)
        def reader():
            return x * 2
        aside(writer)
        try:
            reader()
        except RuntimeError as error:
            print(error)
        """
    said = run(HEAD + textwrap.dedent(script), devices=1)
    now, before = said.split("before:")
    assert "in reader" in now
    assert "in writer" in before
    assert "in aside" in before


def test_a_backward_names_its_node() -> None:
    script = """
        weight = torch.ones(1000, device="cuda", requires_grad=True)
        loss = (weight * weight).sum()
        torch.cuda.synchronize()
        aside(lambda: weight.data.add_(1))
        loss.backward()
        print(*simulated_gpu.races())
        """
    assert "in MulBackward0" in run(HEAD + textwrap.dedent(script), devices=1, races=1)


def test_races_may_be_let_pass() -> None:
    script = "aside(lambda: x.add_(1)); x * 2; print(simulated_gpu.races())"
    assert run(HEAD + script, devices=1, races=0) == "[]"


def test_what_stands_still_is_told_of() -> None:
    script = """
        import time, threading
        ends = threading.Event()
        def hang(_): ends.wait()
        aside(lambda: python_kernels.launch(hang, writes=[x], name="hang"))
        main.wait_stream(side)
        waiter = threading.Thread(target=lambda: (x * 2).sum().item())
        waiter.start()
        while not simulated_gpu.stalls(0.1).count("\\n") >= 3:
            time.sleep(0.05)
        print(simulated_gpu.stalls(0.1))
        ends.set()
        waiter.join()
        """
    said = run(HEAD + textwrap.dedent(script), devices=1)
    assert re.search(r"the host waits for the default stream of device 0 to get behind", said)
    assert re.search(
        r"the default stream of device 0 waits for stream 1 of device 0 to get behind hang by .*; "
        r"asked for: wait by .*; \d tasks behind it",
        said,
    )
    assert re.search(r"stream 1 of device 0 runs hang by .*; \d tasks behind it", said)


def test_a_stall_is_told_of_once_without_being_asked() -> None:
    script = """
        import os, sys, time
        os.dup2(1, 2)
        python_kernels.launch(lambda _: time.sleep(4), writes=[x], name="slow")
        torch.cuda.synchronize()
        """
    said = run(HEAD + textwrap.dedent(script), devices=1, stall_s=1)
    assert said.count("stands still") == 1
    assert "the default stream of device 0 runs slow" in said


def test_a_trace_lists_what_was_asked_for() -> None:
    script = """
        with simulated_gpu.trace() as trace:
            y = torch.ones(4, 8, device="cuda") @ torch.ones(8, 2, device="cuda")
            side.wait_stream(main)
            aside(lambda: pinned[:8].copy_(y.view(-1), non_blocking=True))
            side.synchronize()
            pinned.add_(1)
            simulated_gpu.mark("mark", 5)
        for each in trace:
            print(*(each[name] for name in ("kind", "name", "link")), int(each["flops"]), end=" ")
            print(each["read"], each["written"])
        print([each["point"] for each in trace if each["kind"] != "kernel"])
        """
    lines = run(HEAD + textwrap.dedent(script), devices=1).splitlines()
    assert lines[:-1] == [
        "kernel aten::fill_ device 0 0 128",
        "kernel aten::fill_ device 0 0 64",
        "kernel aten::mm device 128 192 32",
        "record   0 0 0",
        "wait   0 0 0",
        "kernel copy_ down 0 32 32",
        "record   0 0 0",  # of the memory of the host, which is not given out again before
        "record   0 0 0",
        "host wait   0 0 0",
        "host kernel aten::add_ host 0 0 4000",
        "mark   0 0 0",
    ]
    assert lines[-1] == "[3, 3, 6, 7, 7, -1, 5]"
