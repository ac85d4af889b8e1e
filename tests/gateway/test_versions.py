"""Volunteers of several releases: a program goes to those that have its operators, and to nobody else."""

import msgspec
import pytest
from simulated import Simulated, checks, leases, only, task, told, withdrawn

from goblin_dask import messages as m
from goblin_dask.digest import digest
from goblin_dask.errors import Refused
from goblin_dask.gateway.events import Needs
from goblin_dask.gateway.labs import Lab, LabLimits
from goblin_dask.gateway.peers import check_machine
from goblin_dask.graphs.operators import CATALOGUE_VERSION
from goblin_dask.graphs.program import Program
from tests.gridpeers import PROGRAM, Bench, FakeLab, FakeValidator, FakeVolunteer, machine, program, submission

NEW = Needs(2, frozenset({"convolution"}))
OLD = Needs(1, frozenset({"add"}))


@pytest.fixture
def grid():
    grid = Simulated()
    grid.lab()
    grid.validator(catalogue=2)
    return grid


def failed(out):
    return only(told(out, m.TaskFailed))


def test_an_old_volunteer_gets_what_it_knows_and_nothing_else(grid):
    grid.volunteer("old", slots=64)
    grid.volunteer("new", catalogue=2)
    grid.wait(20)
    out = []
    for i in range(40):
        out += grid.submit(task(i), needs=NEW if i % 2 else OLD)
    new = {task(i).task for i in range(1, 40, 2)}
    assert {lease.worker for lease in leases(out) if lease.task in new} == {"new"}
    for _ in range(100):
        for lease in leases(out):
            out = grid.fail(lease, "cancelled") if lease.task not in new else grid.hand_in(lease)
            assert not [one for one in leases(out) if one.task in new and one.worker == "old"]


def test_new_tasks_at_the_head_of_the_queue_do_not_keep_an_old_volunteer_idle(grid):
    grid.volunteer("new", catalogue=2, slots=1)
    grid.wait(20)
    for i in range(3 * grid.limits.scan):
        grid.submit(task(i, priority=(0,)), needs=NEW)
    grid.submit(task("old", priority=(1,)), needs=OLD)
    assert only(leases(grid.volunteer("old"))).task == task("old").task


def test_what_nobody_knows_goes_to_the_laboratory_at_once_and_says_why(grid):
    grid.volunteer("old")
    grid.wait(20)
    answer = failed(grid.submit(task(1), needs=NEW))
    assert answer.kind == "unsupported"
    assert "needs version 2" in answer.reason
    assert "newest volunteer has version 1" in answer.reason
    assert leases(grid.submit(task(2), needs=OLD))


def test_while_there_is_no_volunteer_at_all_it_waits(grid):
    grid.wait(20)
    assert not told(grid.submit(task(1), needs=NEW) + grid.wait(60), m.TaskFailed)
    assert only(leases(grid.volunteer("new", catalogue=2))).worker == "new"


def test_queued_tasks_end_some_time_after_the_last_who_knew_them_left(grid):
    grid.volunteer("new", catalogue=2, slots=1)
    grid.volunteer("old", slots=1)
    grid.wait(20)
    for i in range(5):
        grid.submit(task(i), needs=NEW)
    grid.leave("new")
    assert not told(grid.wait(1), m.TaskFailed)
    assert len(told(grid.wait(2 * grid.limits.patience), m.TaskFailed)) == 5


@pytest.mark.parametrize("late", [False, True])
def test_an_operator_that_a_volunteer_lacks(grid, late):
    """Also where it joins when the task waits already, and then is the only one."""
    if late:
        grid.volunteer("full", catalogue=2, memory=10)
        grid.wait(20)
        grid.submit(task(1, peak=10), needs=OLD)
        grid.submit(task(2, peak=10), needs=OLD)
        out = grid.submit(task(3, peak=10), needs=NEW)
        assert not leases(out)
        grid.volunteer("poor", catalogue=2, lacks=("convolution",))
        out = grid.leave("full") + grid.wait(3 * grid.limits.patience)
        lost = [lease for lease in leases(out) if lease.task == task(3).task]
    else:
        grid.volunteer("poor", catalogue=2, lacks=("convolution",))
        grid.wait(20)
        out = grid.submit(task(3), needs=NEW)
        lost = leases(out)
    assert not lost
    answer = failed(out)
    assert (answer.task, answer.kind) == (task(3).task, "unsupported")
    assert answer.reason == "no volunteer has all of its operators (convolution)"


def test_results_are_checked_by_who_knows_the_program(grid):
    grid.validator("old", slots=64)
    grid.volunteer("new", catalogue=2, slots=64)
    grid.wait(20)
    for i in range(10):
        lease = only(leases(grid.submit(task(i), needs=NEW)))
        check = only(checks(grid.hand_in(lease)))
        assert check.worker == "v"
        grid.report(check)


def test_without_a_validator_that_knows_the_program_the_laboratory_computes():
    grid = Simulated()
    grid.lab()
    grid.validator("old")
    grid.volunteer("new", catalogue=2)
    grid.wait(20)
    answer = failed(grid.submit(task(1), needs=NEW))
    assert "newest validator has version 1" in answer.reason


def test_a_result_that_nobody_who_is_left_can_check_goes_to_the_laboratory(grid):
    grid.volunteer("new", catalogue=2)
    grid.wait(20)
    lease = only(leases(grid.submit(task(1), needs=NEW)))
    grid.leave("v")
    grid.hand_in(lease)
    grid.validator("old")
    assert failed(grid.wait(2 * grid.limits.patience)).reason.startswith("its program needs version 2")


def test_a_backup_goes_to_who_knows_the_program(grid):
    grid.volunteer("new", catalogue=2)
    grid.wait(20)
    lease = only(leases(grid.submit(task(1), needs=NEW)))
    grid.volunteer("old")
    assert not leases(grid.wait(lease.deadline - 1))
    assert only(leases(grid.volunteer("other", catalogue=3))).worker == "other"
    assert not withdrawn(grid.log)


def test_a_program_that_is_refused_all_the_same_goes_to_another(grid):
    """Whatever a volunteer announces, it refuses what it does not know."""
    grid.volunteer("liar", catalogue=2)
    grid.wait(20)
    lease = only(leases(grid.submit(task(1), needs=NEW)))
    grid.volunteer("honest", catalogue=2)
    again = only(leases(grid.fail(lease, "unsupported", reason="unknown operator 'convolution'")))
    assert again.worker == "honest"


# --- on the wire ------------------------------------------------------------------------------------------------------
def test_old_and_new_messages_are_read_alike():
    old = msgspec.msgpack.encode({"host": "a" * 32, "memory": 5})  # as it was sent before there were versions
    assert msgspec.msgpack.decode(old, type=m.Machine).catalogue == 1
    plain = msgspec.msgpack.decode(m.encode(m.Machine("a" * 32)))
    assert plain == {"host": "a" * 32}, "an old gateway is told nothing that it does not know"
    assert msgspec.msgpack.decode(m.encode(m.DefineProgram("p", b"e"))) == {
        "type": "DefineProgram",
        "program": "p",
        "encoded": b"e",
    }
    new = m.DefineProgram("p", b"e", 2)
    assert m.decode(m.encode(new), m.decoder(m.ToGateway)) == new
    told_ = m.Machine("a" * 32, catalogue=2, lacks=("sort",))
    assert msgspec.msgpack.decode(m.encode(told_), type=m.Machine) == told_


@pytest.mark.parametrize("changes", [{"catalogue": 0}, {"lacks": ("x",) * 257}, {"lacks": ("x" * 65,)}])
def test_what_a_machine_says_of_its_catalogue_is_bounded(changes):
    with pytest.raises(Refused, match="version 1 or later"):
        check_machine(machine(**changes), "volunteer")


async def test_a_gateway_says_which_programs_it_is_too_old_for():
    async with Bench() as bench:
        lab = await bench.add(FakeLab)
        await bench.add(FakeVolunteer)
        await bench.add(FakeValidator)
        later = b"of a release that is not there yet"
        lab.session.send(m.DefineProgram(digest(later), later, CATALOGUE_VERSION + 1))
        lab.submit(submission(1, program=later), submission(2))
        [answer] = await lab.until(lambda: lab.got(m.TaskFailed))
        assert answer.kind == "unsupported"
        assert f"needs version {CATALOGUE_VERSION + 1}" in answer.reason
        await lab.accepted(1)  # it stays connected, and what is known is computed


def test_a_laboratory_cannot_ask_for_less_than_a_program_needs(monkeypatch):
    monkeypatch.setattr(Program, "catalogue", property(lambda self: 2))
    for said in (1, 2):
        lab = Lab("l", "owner", b"", "", "", "", "", "", None)
        lab.define(m.DefineProgram(digest(PROGRAM), PROGRAM, said), LabLimits())
        assert lab.needs == {digest(PROGRAM): Needs(2, frozenset({"add"}))}


def test_of_a_program_that_is_dropped_nothing_stays():
    lab = Lab("l", "owner", b"", "", "", "", "", "", None)
    for operator in ("add", "multiply", "subtract"):
        encoded = program(operator)
        lab.define(m.DefineProgram(digest(encoded), encoded), LabLimits(programs=2))
    assert lab.needs.keys() == lab.programs.keys()
    assert len(lab.needs) == 2
