"""What a process can still say to the C library's heap."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from zrun_core.spine.heap import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def step():
    for _ in range(4):
        torch.ones(16 << 20)  # 64 MiB, which glibc maps anew each time
for _ in range(4):
    step()  # the heap grows to what a step needs
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    command = [sys.executable, "-c", SCRIPT, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env={}).stdout)


@pytest.mark.thorough
def test_a_step_that_repeats_takes_no_new_pages():
    assert faults("keep") < faults("leave") / 10


def test_an_environment_that_says_how_the_heap_is_to_be_is_obeyed(monkeypatch):
    from zrun_core.spine.heap import keep_freed_memory

    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    assert not keep_freed_memory()


HOLES = """
import torch
from zrun_core.spine.heap import give_back_freed_memory, keep_freed_memory
def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096
keep_freed_memory()
blocks = [torch.ones(256 << 10) for _ in range(128)]  # 128 MiB
before = resident()
del blocks[::2]
kept = resident()
give_back_freed_memory()
print(before - kept, before - resident())
"""


@pytest.mark.thorough
def test_holes_in_a_heap_that_keeps_them_can_be_given_back():
    command = [sys.executable, "-c", HOLES]
    found = subprocess.run(command, check=True, capture_output=True, text=True, env={}).stdout
    at_first, then = map(int, found.split())
    assert at_first < 8 << 20
    assert then > 56 << 20
