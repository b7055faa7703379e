"""The backend `nccl` of simulated GPUs, by real processes."""

from __future__ import annotations

from ranks import run

COLLECTIVES = """
import torch, torch.distributed as dist
full = torch.arange(8.0, device=device) + rank
work = dist.all_reduce(full, async_op=True)
work.wait()
say(full.tolist())
gathered = torch.empty(8, dtype=torch.bfloat16, device=device)
own = gathered[4 * rank:4 * rank + 4]
own.fill_(rank + 1)
dist.all_gather_single(gathered, own)
say(gathered.tolist())
part = torch.empty(4, device=device)
dist.reduce_scatter_single(part, full)
say(part.tolist())
shared = torch.full((3,), rank, dtype=torch.int64, device=device)
dist.broadcast(shared, 1)
say(shared.tolist())
if rank == 0:
    dist.send(full, 1)
else:
    received = torch.empty(8, device=device)
    dist.recv(received, 0)
    say(torch.equal(received, full))
dist.barrier()
say("over")
"""


def test_collectives_and_messages() -> None:
    first, second = run(COLLECTIVES, 2, delay_us=300, seed=3)
    assert first.code == second.code == 0, first.error + second.error
    full = [float(2 * each + 1) for each in range(8)]
    gathered = [1.0] * 4 + [2.0] * 4
    assert first.said == [full, gathered, [2 * each for each in full[:4]], [1, 1, 1], "over"]
    assert second.said == [full, gathered, [2 * each for each in full[4:]], [1, 1, 1], True, "over"]


def test_works_are_asynchronous_and_waiting_makes_a_stream_wait() -> None:
    """The second rank is late: the first one's host goes on, and finds the old values till then."""
    script = """
    import time
    import simulated_gpu.install
    ext = simulated_gpu.install.extension()
    tensor = torch.ones(4, device=device)
    dist.all_reduce(torch.zeros(1, device=device))  # makes the communicator
    torch.cuda.synchronize()
    gate = f"{os.environ['STORE']}.gate"
    if rank == 1:
        while not os.path.exists(gate):
            time.sleep(0.01)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        say([ext.on_host(tensor).tolist(), work.is_completed()])
        work.wait()
        doubled = tensor * 2
        say(ext.on_host(tensor).tolist())
        open(gate, "w").close()
        say(doubled.tolist())
    else:
        work.wait()
    say(work.is_completed() or tensor.tolist() == [2.0] * 4)
    """
    first, second = run(script, 2)
    assert first.said == [[[1.0] * 4, False], [1.0] * 4, [4.0] * 4, True], first.error
    assert second.said == [True], second.error


def test_the_host_waits_where_it_is_asked_to() -> None:
    script = """
    from simulated_gpu.nccl.watchdog import watchdog
    tensor = torch.ones(4, device=device)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    say([work.is_completed(), watchdog._is_running])
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)  # nobody else does
        try:
            work.wait(timedelta(seconds=0.2))
        except dist.DistBackendError as error:
            say(str(error))
    """
    first, second = run(script, 2, more={"TORCH_NCCL_BLOCKING_WAIT": "1"}, delay_us=1000)
    assert first.said[0] == second.said[0] == [True, False], first.error + second.error
    assert (
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, "
        in (first.said[1])
    )
    assert "timed out in blocking wait" in first.error


def test_two_ranks_that_both_send_first_wait_for_ever() -> None:
    """On one communicator: those of two groups come through, and small ones find room."""
    script = """
    import time
    again = dist.new_group([0, 1])
    def exchange(there, back, numel):
        sent = torch.full((numel,), float(rank), device=device)
        received = torch.empty(numel, device=device)
        sending, receiving = (there, back) if rank == 0 else (back, there)
        a = sending.send([sent], 1 - rank, 0)
        b = receiving.recv([received], 1 - rank, 0)
        event = torch.cuda.Event()
        a.wait(), b.wait()
        event.record()
        deadline = time.monotonic() + 2
        while not event.query() and time.monotonic() < deadline:
            time.sleep(0.01)
        return event.query()
    world = dist.group.WORLD
    for group in (world, again):
        move = group.send if rank == 0 else group.recv
        move([torch.ones(1, device=device)], 1 - rank, 0)
    say([exchange(world, again, 5000), exchange(world, world, 100), exchange(world, world, 5000)])
    """
    for ended in run(script, 2, nccl_buffer=4096):
        assert ended.said == [[True, True, False]], ended.error


def test_hosts_that_make_communicators_in_two_orders_wait_for_ever() -> None:
    script = """
    import threading, time
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    def meet():
        for group in (groups if rank == 0 else groups[::-1]):
            move = group.send if rank == 0 else group.recv
            move([torch.ones(1, device=device)], 1 - rank, 0)
    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    thread.join(2)
    say(thread.is_alive())
    """
    assert [ended.said for ended in run(script, 2)] == [[True]] * 2


TIMEOUT = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100"}


def test_a_work_that_takes_too_long_ends_the_process_as_torch_does() -> None:
    script = """
    import time
    join(timeout=timedelta(seconds=60))
    group = dist.new_group([0, 1], timedelta(seconds=1))
    dist.all_reduce(torch.ones(3, device=device), group=group)
    torch.cuda.synchronize()
    say("met")
    if rank == 0:
        dist.all_gather_single(torch.empty(8, device=device), torch.ones(4, device=device), group)
        torch.cuda.synchronize()
        say("never")
    time.sleep(4)
    """
    first, second = run(script, 2, joins=False, more=TIMEOUT)
    assert (first.code, first.said) == (-6, ["met"])
    assert second.code == 0, second.error
    for words in (
        "[rank0]:[E",
        " ProcessGroupNCCL.cpp:",
        "] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, "
        "OpType=_ALLGATHER_BASE, NumelIn=4, NumelOut=8, Timeout(ms)=1000) ran for 1",
        " milliseconds before timing out.",
        "[PG ID 1 PG GUID 1 Rank 0]  failure detected by watchdog at work sequence id: 2 PG status:"
        " last enqueued work: 2, last completed work: 1",
        "[Rank 0] To avoid data inconsistency, we are taking the entire process down.",
        "[PG ID 1 PG GUID 1 Rank 0] Process group watchdog thread terminated with exception: ",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
    ):
        assert words in first.error


DEAD = """
import time
join(timeout=timedelta(seconds=1.5))
tensor = torch.ones(3, device=device)
dist.all_reduce(tensor)
torch.cuda.synchronize()
if rank == 1:
    os._exit(9)
time.sleep(0.3)
work = dist.all_reduce(tensor, async_op=True)
deadline = time.monotonic() + 0.5
while not work.is_completed() and time.monotonic() < deadline:
    time.sleep(0.01)
try:
    work.wait()
    say("waits")
except dist.DistBackendError as error:
    say(str(error).splitlines()[1])
time.sleep(10)
"""


def test_a_rank_that_dies_keeps_those_of_its_host_waiting() -> None:
    first, second = run(DEAD, 2, joins=False, more=TIMEOUT)
    assert (second.code, first.code, first.said) == (9, -6, ["waits"]), first.error
    assert "Watchdog caught collective operation timeout" in first.error


def test_a_rank_that_dies_is_an_error_over_a_network() -> None:
    first, second = run(DEAD, 2, joins=False, more=TIMEOUT, nccl_remote_errors=1)
    assert (second.code, first.code) == (9, -6), first.error
    told = (
        "ncclRemoteError: A call failed possibly due to a network error or a remote process "
        "exiting prematurely."
    )
    assert first.said == [told]
    assert "raised the following async exception: NCCL error in: " in first.error
    assert "operation timeout" not in first.error


def test_groups_end_by_abort_and_by_their_destruction() -> None:
    script = """
    group = dist.new_group([0, 1])
    tensor = torch.ones(3, device=device)
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()  # an abort ends what has not run
    if rank == 0:
        hangs = dist.all_reduce(tensor, group=group, async_op=True)
        event = torch.cuda.Event()
        hangs.wait()
        event.record()
        say(event.query())
        group.abort()
        event.synchronize()
        say(event.query())
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    dist.destroy_process_group()
    say([total.item(), dist.is_initialized()])
    """
    first, second = run(script, 2)
    assert first.said == [False, True, [2.0, False]], first.error
    assert second.said == [[2.0, False]], second.error


def test_with_a_device_id_messages_take_the_groups_communicator() -> None:
    script = """
    join(device_id=device)
    tensor = torch.ones(3, device=device)
    move = dist.send if rank == 0 else dist.recv
    move(tensor, 1 - rank)
    torch.cuda.synchronize()
    say(sorted(dist.group.WORLD._communicators))
    """
    assert [ended.said for ended in run(script, 2, joins=False)] == [[["all"]]] * 2
    lazily = script.replace("device_id=device", "")
    assert [ended.said for ended in run(lazily, 2, joins=False)] == [[["0:1"]]] * 2


def test_collectives_of_two_groups_in_two_orders_stop_where_kernels_take_turns() -> None:
    script = """
    import time
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    for group in groups:
        dist.all_reduce(torch.ones(3, device=device), group=group)
    torch.cuda.synchronize()
    works = [
        dist.all_reduce(torch.ones(3, device=device), group=group, async_op=True)
        for group in (groups if rank == 0 else groups[::-1])
    ]
    deadline = time.monotonic() + 3
    while not all(work.is_completed() for work in works) and time.monotonic() < deadline:
        time.sleep(0.01)
    say(all(work.is_completed() for work in works))
    """
    assert [ended.said for ended in run(script, 2)] == [[True]] * 2
    assert [ended.said for ended in run(script, 2, nccl_concurrent=1)] == [[False]] * 2


def test_a_watchdog_that_stands_still_ends_the_process() -> None:
    script = """
    import time
    from simulated_gpu.nccl.watchdog import watchdog
    dist.all_reduce(torch.ones(3, device=device))
    watchdog.is_stuck = True
    time.sleep(20)
    """
    for ended in run(script, 2, more={"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1"}):
        assert ended.code == -6
        assert "ProcessGroupNCCL's watchdog got stuck for 1 seconds without making" in ended.error
        assert "due to ProcessGroupNCCL watchdog hang." in ended.error


def test_communicators_take_memory_of_the_device() -> None:
    script = """
    def taken():
        free, total = torch.cuda.mem_get_info()
        return (total - free) >> 20
    tensor = torch.ones(3, device=device)  # a block of the allocator is taken for it
    before = taken()
    dist.all_reduce(tensor)
    of_group = taken()
    move = dist.send if rank == 0 else dist.recv
    move(tensor, 1 - rank)
    say([before, of_group, taken(), torch.cuda.get_device_properties(device).total_memory >> 20])
    try:
        torch.empty(200 << 20, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        say("full")
    """
    settings = {"memory": 256 << 20, "nccl_group_mib": 48, "nccl_pair_mib": 16}
    for ended in run(script, 2, **settings):
        before, of_group, of_both, total = ended.said[0]
        assert (of_group - before, of_both - of_group, total) == (48, 16, 256), ended.error
        assert ended.said[1] == "full"


def test_what_torch_builds_on_it_works() -> None:
    """Data parallelism, coalescing, messages in batches: what tests compare zrun with."""
    script = """
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(4, 2).to(device), device_ids=[rank])
    model(torch.full((1, 4), float(rank + 1), device=device)).sum().backward()
    say([model.module.weight.grad[0].tolist(), round(float(model.module.weight.sum()), 5)])
    parts = [torch.full((2,), float(rank), device=device) for _ in range(3)]
    with dist._coalescing_manager(async_ops=True) as together:
        for part in parts:
            dist.all_reduce(part)
    together.wait()
    say([part.tolist() for part in parts])
    sent, received = torch.full((3,), float(rank), device=device), torch.empty(3, device=device)
    ops = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    say(received.tolist())
    turned = torch.empty(4, device=device)
    dist.all_to_all_single(turned, torch.arange(4.0, device=device) + 10 * rank)
    say(turned.tolist())
    """
    first, second = run(script, 2, delay_us=200)
    assert first.said[0] == second.said[0], first.error + second.error
    assert first.said[0][0] == [1.5] * 4
    assert first.said[1:] == [[[1.0, 1.0]] * 3, [1.0] * 3, [0.0, 1.0, 10.0, 11.0]]
    assert second.said[1:] == [[[1.0, 1.0]] * 3, [0.0] * 3, [2.0, 3.0, 12.0, 13.0]]
