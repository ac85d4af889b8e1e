"""Every actor is a process of its own, and something happens to one: the job completes, and is right.

What a test here calls *kept*: computed once, by the worker that had it when the fault came.

Situations that have gone wrong elsewhere, and where each is tested:

==  ================================================  ==========================================================
 7  right results thrown away after a bad end         gateway ``test_a_checked_result_counts_...``
 8  a nonsense speed makes a nonsense deadline        gateway ``test_a_nonsense_speed_makes_...``
10  a flickering worker makes its tasks fail          gateway ``test_host_loss_is_not_the_tasks_fault``, the cuts here
11  all idle, tasks "processing" for ever             gateway ``test_a_single_volunteer_that_never_...``,
                                                      ``test_a_volunteer_never_answers`` here
12  a computation stops the heartbeat                 ``test_a_process_that_stands_still_for_a_while`` here
14  an upload that is "uploading" for ever            store ``test_a_crash_leaves_no_half_upload``,
                                                      ``test_an_upload_is_cut_halfway`` here
17  a bad frame costs others                          wire ``test_border.py``: ``honest`` goes on beside every attack
18  idle connections are cut                          wire ``test_an_idle_session_stays_up_by_its_keepalives``
20  versions that differ                              wire ``test_another_version_is_refused_with_a_sentence_...``
==  ================================================  ==========================================================
"""

import signal
import time

import pytest

from goblin_dask.errors import JobCancelled
from goblin_dask.testing.faults import Proxy
from tests.system.bench import Bench, until

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    bench = Bench(tmp_path_factory.mktemp("faults"))
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def relayed(tmp_path_factory):
    """A grid whose blobs all go through the gateway, and so through the proxy."""
    bench = Bench(tmp_path_factory.mktemp("relayed"), tasks=2, routes="relay")
    yield bench
    bench.close()


@pytest.fixture
def slow(full):
    """Of a test that waits for a timeout of many seconds, and so runs with ``--full`` only."""
    if not full:
        pytest.skip("waits long: make full runs it")


def computing(notes, mark, *pids):
    """Waits until one of these workers is in the midst of a task."""
    return notes.wait(mark, lambda note: note.what == "computes" and note.pid in pids)


def test_a_volunteer_is_killed_midway(bench, report):
    victim, other = bench.ensure(2)
    mark = bench.notes.mark()
    with bench.submit() as job:
        hit = computing(bench.notes, mark, victim.pid)
        victim.kill()
        killed = time.monotonic()
        again = bench.notes.wait(mark, lambda note: note.what == "computes" and note.task == hit.task and note != hit)
        assert again.pid == other.pid
        bench.check(job)
        report(f"volunteer killed: its task begun again after {again.time - killed:.1f} s; {bench.account(mark, job)}")


def test_a_cut_of_5_seconds_costs_nothing(bench, report):
    bench.ensure(1)
    with Proxy(bench.grid.address) as proxy, bench.guest(proxy.address) as cut_off:
        mark = bench.notes.mark()
        with bench.submit() as job:
            hit = computing(bench.notes, mark, cut_off.pid)
            before = proxy.connections
            proxy.cut()
            begun = time.monotonic()
            bench.notes.wait(mark, lambda note: note.what == "Uploaded" and note.attempt == hit.attempt)
            time.sleep(max(0.0, begun + 5 - time.monotonic()))  # the length of the cut is the point
            proxy.heal()
            healed = time.monotonic()
            accepted = bench.notes.wait(mark, lambda note: note.what == "Checked:accepted" and note.task == hit.task)
            assert proxy.connections > before
            bench.check(job)
            account = bench.account(mark, job)
        assert [note.pid for note in bench.notes.since(mark, "computes") if note.task == hit.task] == [cut_off.pid]
        assert not bench.notes.since(mark, "opened")  # the session itself went on
        report(f"cut of 5 s: its result accepted {accepted.time - healed:.1f} s after the cut; {account}")


def test_the_gateway_is_killed(bench, report):
    volunteers = bench.ensure(2)
    mark = bench.notes.mark()
    with bench.submit() as job:
        hits = [computing(bench.notes, mark, process.pid) for process in volunteers]
        accepted = {note.task for note in bench.notes.since(mark, "Checked:accepted")}
        bench.grid.kill_gateway()
        # what the old gateway may have heard of already, and nobody has accepted, is computed again
        running = {note.attempt for note in hits} - {note.attempt for note in bench.notes.since(mark, "Committed")}
        bench.grid.restart_gateway()
        up = time.monotonic()
        until(lambda: bench.status["volunteers"] == 2, 5.0)
        back = time.monotonic() - up
        bench.check(job)
        account = bench.account(mark, job)
    begun = bench.notes.since(mark, "computes")
    assert running
    for attempt in running:  # whether they ended before the gateway was back, or went on
        ours = [note for note in bench.notes.since(mark) if note.task == attempt.partition("#")[0]]
        assert [note.attempt for note in ours if note.what == "computes"] == [attempt], (up, ours)
    assert not [note for note in begun if note.task in accepted and note.time > up]
    report(
        f"gateway killed: volunteers back {back:.1f} s after its start, {len(running)} running tasks kept; {account}"
    )


def test_an_upload_is_cut_halfway(relayed, report):
    bench = relayed
    bench.ensure(0)
    with Proxy(bench.grid.address) as proxy, bench.guest(proxy.address):
        half = 8 * bench.x[0].size // 2
        proxy.cut_upload_after(half)
        mark = bench.notes.mark()
        with bench.submit() as job:
            cut = bench.notes.wait(mark, lambda note: note.what == "Committed")
            bench.check(job)
            account = bench.account(mark, job)
            assert len(bench.notes.since(mark, "computes")) == job.progress["grid"]
        assert proxy.tripped.is_set()
        uploaded = bench.notes.wait(mark, lambda note: note.what == "Uploaded" and note.attempt == cut.attempt)
        assert not [note for note in bench.notes.since(mark) if note.what.startswith("AttemptFailed")]
        until(lambda: not list((bench.grid.directory / "lab").rglob("staging/*")), 5.0)
        seconds = uploaded.time - cut.time
        report(f"upload cut at {half >> 20} MiB: handed in {seconds:.1f} s after its commitment; {account}")


@pytest.mark.full
def test_a_cut_of_5_seconds_while_blobs_move_costs_no_computation(slow, relayed, report):
    bench = relayed
    bench.ensure(0)
    with Proxy(bench.grid.address) as proxy, bench.guest(proxy.address) as volunteer:
        mark = bench.notes.mark()
        with bench.submit() as job:
            hit = computing(bench.notes, mark, volunteer.pid)
            proxy.cut()
            time.sleep(5)  # the length of the cut is the point
            proxy.heal()
            healed = time.monotonic()
            accepted = bench.notes.wait(mark, lambda note: note.what == "Checked:accepted" and note.task == hit.task)
            bench.check(job)
            account = bench.account(mark, job)
        assert [note.attempt for note in bench.notes.since(mark, "computes") if note.task == hit.task] == [hit.attempt]
        report(f"relay cut for 5 s: its result accepted {accepted.time - healed:.1f} s after the cut; {account}")


def test_a_process_that_stands_still_for_a_while(bench, report):
    """As one does whose computation lets no other thread run: no heartbeat, no answer, and it is nobody's failure."""
    still = bench.ensure(1)[0]
    mark = bench.notes.mark()
    with bench.submit() as job:
        hit = computing(bench.notes, mark, still.pid)
        still.kill(signal.SIGSTOP)
        time.sleep(3)  # the length of the standstill is the point
        still.kill(signal.SIGCONT)
        bench.check(job)
        account = bench.account(mark, job)
    assert [note.attempt for note in bench.notes.since(mark, "computes") if note.task == hit.task] == [hit.attempt]
    report(f"stood still for 3 s: {account}")


@pytest.mark.full
def test_a_volunteer_never_answers(slow, bench, report):
    victim, _ = bench.ensure(2)
    mark = bench.notes.mark()
    with bench.submit() as job:
        hit = computing(bench.notes, mark, victim.pid)
        victim.kill(signal.SIGSTOP)
        stopped = time.monotonic()
        again = bench.notes.wait(mark, lambda note: note.what == "computes" and note.task == hit.task and note != hit)
        bench.check(job)
        account = bench.account(mark, job)
    victim.kill()
    report(f"volunteer stopped: its task begun again after {again.time - stopped:.1f} s; {account}")


@pytest.mark.full
def test_a_cut_for_ever(slow, bench, report):
    bench.ensure(1)
    with Proxy(bench.grid.address) as proxy, bench.guest(proxy.address) as cut_off:
        mark = bench.notes.mark()
        with bench.submit() as job:
            hit = computing(bench.notes, mark, cut_off.pid)
            proxy.cut()
            cut = time.monotonic()
            again = bench.notes.wait(
                mark, lambda note: note.what == "computes" and note.task == hit.task and note.pid != cut_off.pid
            )
            bench.check(job)
            account = bench.account(mark, job)
        report(f"cut for ever: its task begun again after {again.time - cut:.1f} s; {account}")


@pytest.mark.full
def test_the_validator_is_killed(slow, bench, report):
    bench.ensure(2)
    mark = bench.notes.mark()
    with bench.submit() as job:
        hit = bench.notes.wait(mark, lambda note: note.what == "checks")
        for process in bench.grid.validators:
            process.kill()
        killed = time.monotonic()
        bench.validator()
        accepted = bench.notes.wait(mark, lambda note: note.what == "Checked:accepted" and note.task == hit.task, 100.0)
        bench.check(job)
        report(f"validator killed: its check done {accepted.time - killed:.1f} s later; {bench.account(mark, job)}")


def test_a_job_cancelled_halfway_is_gone(bench, report):
    bench.ensure(2)
    blobs = bench.grid.directory / "lab" / "blobs"
    before = set(blobs.rglob("*"))
    job = bench.submit()
    for status in job.events():
        if status["progress"].get("grid", 0) >= bench.tasks / 2:
            break
    begun = time.monotonic()
    job.cancel()
    seconds = time.monotonic() - begun
    assert job.status == "cancelled"
    left = [path for path in set(blobs.rglob("*")) - before if path.is_file()]
    with pytest.raises(JobCancelled):
        job.result()
    until(lambda: not sum(bench.status["tasks"][state] for state in ("queued", "leased", "committed", "checking")), 5.0)
    report(f"cancelled at half: gone after {seconds:.2f} s; {len(left)} blobs left")
    assert not left
    last = bench.notes.mark()
    job.release()
    assert not bench.notes.since(last, "computes")
