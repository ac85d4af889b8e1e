"""The dispatcher, situation by situation: each test is a sequence of events."""

import random

import pytest
from simulated import (
    SMALL,
    Simulated,
    blob,
    checks,
    inline,
    leases,
    only,
    records,
    task,
    told,
    withdrawn,
)

from goblin_dask import messages as m
from goblin_dask.digest import digest
from goblin_dask.gateway import events as e
from goblin_dask.gateway.limits import Limits
from goblin_dask.verify.reputation import Reputation


@pytest.fixture
def grid():
    """A laboratory, a validator, two volunteers of different owners; the start's patience is over."""
    grid = Simulated()
    grid.lab()
    grid.validator()
    grid.volunteer("a")
    grid.volunteer("b")
    grid.wait(20)
    grid.log.clear()
    return grid


def accepted(out):
    return only(told(out, m.TaskAccepted))


def test_a_task_is_leased_committed_uploaded_checked_and_accepted(grid):
    lease = only(leases(grid.submit(task(1))))
    assert lease.inputs == task(1).inputs
    assert lease.deadline >= grid.limits.lease_least
    assert not checks(grid.commit(lease))
    check = only(checks(grid.upload(lease)))
    assert check.check.of == lease.attempt
    assert check.check.outputs == (blob(f"out {lease.task}"),)
    answer = accepted(grid.report(check))
    assert answer.verdict.method == "algebraic"
    assert answer.verdict.ratio == 0.5
    assert answer.verdict.miss == 1e-6
    assert (answer.verdict.attempts, answer.verdict.rejected) == (1, 0)
    identity = grid.dispatcher.leases.pool.all[lease.worker].record.identity
    assert answer.verdict.volunteers == (identity,)
    assert records(grid.log, "accepted")[0].attempt == lease.attempt


def test_nothing_is_checked_before_it_was_handed_in(grid):
    lease = only(leases(grid.submit(task(1))))
    assert not checks(grid.upload(lease))
    assert only(records(grid.log, "ignored")).reason == "uploaded before it committed"
    assert not checks(grid.commit(lease, uploaded=True)), "not inline, so it cannot have been uploaded by committing"
    assert checks(grid.upload(lease))


def test_inline_outputs_are_checked_at_once(grid):
    lease = only(leases(grid.submit(task(1, outputs=(SMALL,)))))
    check = only(checks(grid.commit(lease, (inline(),), uploaded=True)))
    assert accepted(grid.report(check)).outputs == (inline(),)


def test_submitting_again_is_harmless_and_an_accepted_task_answers_at_once(grid):
    lease = only(leases(grid.submit(task(1))))
    assert not grid.submit(task(1))
    check = only(checks(grid.hand_in(lease)))
    answer = accepted(grid.report(check))
    again = grid.submit(task(1))
    assert accepted(again) == answer
    assert not leases(again)
    grid.do(e.TaskCancelled("lab", lease.task))
    assert leases(grid.submit(task(1))), "cancelling forgets the answer: the laboratory dropped the blobs"


def test_a_repeated_upload_counts_once(grid):  # situation 15
    lease = only(leases(grid.submit(task(1))))
    check = only(checks(grid.hand_in(lease)))
    assert not checks(grid.hand_in(lease))
    grid.report(check)
    assert not told(grid.report(check), m.TaskAccepted)
    host = grid.dispatcher.leases.pool.all[lease.worker].record
    assert (host.accepted, grid.dispatcher.outcomes.totals.tasks["accepted"]) == (1, 1)


def test_the_first_commitment_binds(grid):
    lease = only(leases(grid.submit(task(1))))
    grid.commit(lease, (blob("first"),))
    grid.commit(lease, (blob("second"),))
    assert only(records(grid.log, "ignored")).reason == "a second commitment that differs"
    assert only(checks(grid.upload(lease))).check.outputs == (blob("first"),)


@pytest.mark.parametrize(
    "outputs",
    [
        (),
        (blob("x"), blob("y")),
        (blob("x", m.ArraySpec((512, 511), "float32")),),
        (m.BlobRef(digest(b"x"), m.ArraySpec((512, 512), "float64"), 1 << 21),),
        (m.BlobRef(digest(b"x"), m.ArraySpec((512, 512), "float32"), 17),),
        (m.BlobRef("../../etc/passwd", m.ArraySpec((512, 512), "float32"), 1 << 20),),
    ],
)
def test_outputs_that_are_not_of_the_declared_form_are_proven_wrong(grid, outputs):
    lease = only(leases(grid.submit(task(1))))
    out = grid.commit(lease, outputs)
    record = only(records(out, "wrong"))
    assert (record.method, record.worker) == ("structural", lease.worker)
    assert only([i for i in out if isinstance(i, e.Quarantine)]).worker == lease.worker, "no machine errs like that"
    assert only(leases(out)).worker != lease.worker
    assert not checks(grid.upload(lease))


def test_inline_bytes_that_are_not_those_of_their_digest(grid):
    lease = only(leases(grid.submit(task(1, outputs=(SMALL,)))))
    out = grid.commit(lease, (m.BlobRef(digest(bytes(16)), SMALL, 16, b"x" * 16),), uploaded=True)
    assert only(records(out, "wrong")).method == "structural"


def test_a_wrong_result_is_blamed_dropped_and_computed_again(grid):  # situation 2
    lease = only(leases(grid.submit(task(1))))
    check = only(checks(grid.hand_in(lease, (blob("lie"),))))
    out = grid.report(check, "wrong")
    assert only(told(out, m.DropUploads)).digests == (blob("lie").digest,)
    assert not told(out, m.TaskAccepted)
    again = only(leases(out))
    host = grid.dispatcher.reputation.hosts[only(records(out, "wrong")).host_key]
    assert (host.accepted, host.wrong) == (0, 1)
    assert grid.dispatcher.outcomes.totals.tasks["accepted"] == 0
    answer = accepted(grid.report(only(checks(grid.hand_in(again)))))
    assert (answer.verdict.rejected, answer.verdict.attempts) == (1, 2)


def test_a_report_that_accepts_without_a_number_is_no_acceptance(grid):
    lease = only(leases(grid.submit(task(1))))
    check = only(checks(grid.hand_in(lease)))
    out = grid.report(check, ratio=float("nan"))
    assert not told(out, m.TaskAccepted)
    assert only(checks(out)).check.of == lease.attempt


def test_dropped_uploads_are_never_inputs_nor_what_another_attempt_committed(grid):
    lease = only(leases(grid.submit(task(1))))
    check = only(checks(grid.hand_in(lease, (blob("a"),))))
    assert not told(grid.report(check, "wrong"), m.DropUploads)


def test_unproven_goes_to_another_owner_then_a_validator_recomputes(grid):
    first = only(leases(grid.submit(task(1))))
    out = grid.report(only(checks(grid.hand_in(first))), "unproven")
    assert not records(out, "wrong")
    second = only(leases(out))
    assert second.worker != first.worker
    out = grid.report(only(checks(grid.hand_in(second, (blob("other"),)))), "unproven")
    check = only(checks(out))
    assert (check.check.method, check.check.of) == ("recompute", second.attempt)
    answer = accepted(grid.report(check))
    assert answer.verdict.method == "recompute"
    assert only(told(grid.log, m.DropUploads)).attempt == first.attempt


def test_unproven_without_another_owner_is_recomputed_after_some_patience(grid):
    grid.leave("b")
    first = only(leases(grid.submit(task(1))))
    out = grid.report(only(checks(grid.hand_in(first))), "unproven")
    assert not leases(out)
    check = only(checks(grid.wait(2 * grid.limits.patience)))
    assert check.check.method == "recompute"
    assert only(told(grid.report(check, "unproven"), m.TaskFailed)).kind == "unverifiable"


def test_a_host_without_one_good_result_gets_less_and_less(grid):  # situation 1
    grid.leave("b")
    for number in range(40):
        grid.submit(task(number))
    given = 0
    for _ in range(100):
        for d in [d for d in leases(grid.log) if d.attempt in grid.dispatcher.leases.hands]:
            grid.fail(d, "fetch")
            given += 1
        grid.wait(1)
    assert 3 <= given < 12, "after 100 s of failing at once the pauses are longer than that"
    assert grid.dispatcher.snapshot()["workers"][1]["quota"] == 0


def test_quota_grows_with_verified_success_alone(grid):
    grid.leave("b")
    grid.leave("a")
    grid.volunteer("c", slots=16)
    out = []
    for number in range(60):
        out += leases(grid.submit(task(number)))
    assert len(out) == 2
    grid.commit(out[0])
    grid.upload(out[0])
    check = checks(grid.log)[-1]
    assert len(leases(grid.log)) == 3, "the slot is free, no more"
    more = leases(grid.report(check))
    assert len(more) == 1, "one more than before"


def test_host_loss_is_not_the_tasks_fault(grid):  # situation 10
    grid.leave("b")
    grid.submit(task(1))
    for _ in range(5):
        out = grid.leave("a")
        assert not told(out, m.TaskFailed)
        out = grid.volunteer("a") + grid.wait(40)
        assert leases(out)


def test_after_three_losses_on_distinct_hosts_the_laboratory_computes_it(grid):
    grid.submit(task(1))
    grid.volunteer("c")
    failures = []
    for _ in range(3):
        running = only(list(grid.dispatcher.leases.hands.values()))
        failures += told(grid.leave(running.worker.id), m.TaskFailed)
    assert only(failures).kind == "lost"
    assert not grid.dispatcher.leases.hands
    hosts = grid.dispatcher.reputation.hosts.values()
    assert all(host.streak == 0 for host in hosts), "three hosts agree: it was the task, so they are forgiven"


def test_a_late_result_counts_while_the_task_is_open(grid):  # situation 9
    grid.leave("b")
    lease = only(leases(grid.submit(task(1))))
    out = grid.wait(lease.deadline + 1)
    assert only(records(out, "late")).attempt == lease.attempt
    assert grid.dispatcher.snapshot()["tasks"]["leased"] == 1
    check = only(checks(grid.hand_in(lease)))
    assert accepted(grid.report(check))


def test_a_volunteer_that_never_answers_is_replaced(grid):
    lease = only(leases(grid.submit(task(1))))
    out = grid.wait(lease.deadline + 1)
    other = only(leases(out))
    assert other.worker != lease.worker
    out = grid.report(only(checks(grid.hand_in(other))))
    assert accepted(out)
    assert (lease.worker, lease.attempt) in withdrawn(out)


def test_a_single_volunteer_that_never_answers_does_not_hold_the_task_for_ever(grid):  # situation 11
    grid.leave("b")
    grid.submit(task(1))
    out = grid.wait(7 * 24 * 3600)
    assert only(told(out, m.TaskFailed)).kind == "lost"


def test_a_checked_result_counts_though_its_volunteer_died(grid):  # situation 7
    lease = only(leases(grid.submit(task(1))))
    check = only(checks(grid.hand_in(lease)))
    assert not leases(grid.leave(lease.worker))
    assert accepted(grid.report(check))


def test_a_validator_that_dies_is_replaced(grid):
    lease = only(leases(grid.submit(task(1))))
    check = only(checks(grid.hand_in(lease)))
    out = grid.leave(check.worker)
    assert not records(out, "wrong")
    again = only(checks(grid.validator("w")))
    assert again.check.of == lease.attempt
    assert accepted(grid.report(again))


def test_a_check_that_fails_is_done_elsewhere_without_blame(grid):
    grid.validator("w")
    lease = only(leases(grid.submit(task(1))))
    check = only(checks(grid.hand_in(lease)))
    again = only(checks(grid.report(check, "failed")))
    assert again.worker != check.worker
    assert accepted(grid.report(again))
    assert not records(grid.log, "wrong")


def test_checks_that_always_fail_end(grid):
    grid.submit(task(1))
    for _ in range(60):
        for d in [i for i in grid.log if isinstance(i, e.Dispatch) and i.attempt in grid.dispatcher.leases.hands]:
            if d.check is None:
                grid.hand_in(d)
            else:
                grid.report(d, "failed")
        grid.wait(60)
    assert only(told(grid.log, m.TaskFailed)).kind == "unverifiable"


def test_out_of_memory_goes_to_a_larger_one_only(grid):  # situation 13
    grid.volunteer("small", memory=2 * 10**8)
    grid.leave("a")
    lease = only(leases(grid.submit(task(1, peak=10**8))))
    if lease.worker == "small":
        out = grid.fail(lease, "memory", needs=3 * 10**8, offers=10**8)
        lease = only(leases(out))
    assert lease.worker == "b"
    out = grid.fail(lease, "memory", needs=4 * 10**8, offers=10**8) + grid.wait(20)
    failure = only(told(out, m.TaskFailed))
    assert failure.kind == "too_large"
    assert failure.needs == 4 * 10**8
    assert failure.offers == 8 * 10**9


def test_a_volunteers_word_does_not_raise_the_need_without_bound(grid):
    lease = only(leases(grid.submit(task(1))))
    out = grid.fail(lease, "memory", needs=10**18)
    other = only(leases(out))
    assert other.worker != lease.worker
    assert accepted(grid.report(only(checks(grid.hand_in(other)))))


def test_too_large_is_said_at_once_with_the_numbers(grid):
    failure = only(told(grid.submit(task(1, peak=10**11)), m.TaskFailed))
    assert (failure.kind, failure.needs, failure.offers) == ("too_large", 10**11, 8 * 10**9)


def test_after_a_restart_too_large_waits_for_volunteers_to_come_back():
    grid = Simulated()
    grid.lab()
    grid.volunteer("small")
    assert not told(grid.submit(task(1, peak=10**11)), m.TaskFailed)
    assert only(leases(grid.volunteer("large", memory=2 * 10**11))).worker == "large"


def test_a_large_task_is_not_starved_by_small_ones():
    grid = Simulated()
    grid.lab()
    grid.validator()
    grid.volunteer("a", memory=10**9)
    for number in range(50):
        grid.submit(task(number, peak=4 * 10**8))
    grid.submit(task("large", peak=9 * 10**8, job="large job"))
    for step in range(50):
        grid.wait(3)
        for d in [d for d in leases(grid.log) if d.attempt in grid.dispatcher.leases.hands]:
            if d.task == task("large").task:
                assert step < 20
                return
            grid.report(only(checks(grid.hand_in(d))))
    pytest.fail("the large task was never leased")


@pytest.mark.parametrize("kind", ["compute", "unsupported"])
def test_what_fails_on_three_hosts_is_the_tasks_fault(grid, kind):
    grid.volunteer("c")
    grid.submit(task(1))
    for _ in range(3):
        for d in [d for d in leases(grid.log) if d.attempt in grid.dispatcher.leases.hands]:
            grid.fail(d, kind, reason="ZeroDivisionError")
    failure = only(told(grid.log, m.TaskFailed))
    assert failure.kind == {"compute": "error", "unsupported": "unsupported"}[kind]
    assert "ZeroDivisionError" in failure.reason


def test_stragglers_get_a_backup_and_the_first_accepted_wins(grid):
    slow = only(leases(grid.submit(task(1))))
    fast = only(leases(grid.wait(15)))
    assert fast.worker != slow.worker
    out = grid.report(only(checks(grid.hand_in(fast))))
    assert accepted(out)
    assert withdrawn(out) == [(slow.worker, slow.attempt)]
    assert only(records(out, "withdrawn")).attempt == slow.attempt
    host = grid.dispatcher.leases.pool.all[slow.worker].record
    assert host.streak == 0, "it is no failure to be slower"
    assert not told(grid.hand_in(slow), m.TaskAccepted)


def test_no_backups_while_something_is_queued(grid):
    given = []
    for number in range(10):
        given += leases(grid.submit(task(number)))
    assert len(given) == 4
    assert not leases(grid.wait(30))


def test_an_attempt_is_believed_only_from_its_holder(grid):
    lease = only(leases(grid.submit(task(1))))
    other = "b" if lease.worker == "a" else "a"
    assert not checks(grid.commit(lease, worker=other) + grid.upload(lease, worker=other))
    assert {r.worker for r in records(grid.log, "ignored")} == {other}
    check = only(checks(grid.hand_in(lease)))
    for liar in ("a", "b"):
        assert not told(grid.report(check, worker=liar), m.TaskAccepted)
    assert accepted(grid.report(check))


def test_a_volunteer_cannot_report_a_check_of_its_own_lease(grid):
    lease = only(leases(grid.submit(task(1))))
    forged = m.Checked(lease.attempt, m.CheckReport("accepted", "algebraic", 0.1))
    assert not told(grid.do(e.FromWorker(lease.worker, forged)), m.TaskAccepted)


def test_a_flood_of_unentitled_messages_is_counted_not_recorded(grid):
    for number in range(1000):
        grid.do(e.FromWorker("a", m.Uploaded(f"{digest(b'x')}#{number}")))
    assert len(records(grid.log, "ignored")) == 10
    assert grid.dispatcher.leases.pool.all["a"].ignored == 1000


def test_cancel_withdraws_and_drops(grid):
    first = only(leases(grid.submit(task(1))))
    grid.commit(first)
    second = only(leases(grid.submit(task(2))))
    check = only(checks(grid.hand_in(second)))
    out = grid.do(e.TaskCancelled("lab", first.task)) + grid.do(e.TaskCancelled("lab", second.task))
    assert set(withdrawn(out)) == {(first.worker, first.attempt), (check.worker, check.attempt)}
    assert {d.attempt for d in told(out, m.DropUploads)} == {first.attempt, second.attempt}
    assert grid.dispatcher.snapshot()["tasks"] == {"accepted": 0, "failed": 0}
    assert not grid.wait(1000 * 60) or not leases(grid.log[-50:])


def test_a_withdrawn_slot_is_free_when_the_worker_lets_go_or_after_a_grace():
    grid = Simulated()
    grid.lab()
    grid.volunteer("a", slots=1)
    first = only(leases(grid.submit(task(1))))
    grid.submit(task(2))
    assert not leases(grid.do(e.TaskCancelled("lab", first.task)))
    second = only(leases(grid.fail(first, "cancelled")))
    grid.submit(task(3))
    assert not leases(grid.do(e.TaskCancelled("lab", second.task)))
    assert only(leases(grid.wait(11))).task == task(3).task


def test_one_laboratory_learns_nothing_of_another(grid):
    grid.lab("other")
    mine = only(leases(grid.submit(task(1))))
    theirs = only(leases(grid.submit(task(1), lab="other")))
    assert theirs.lab == "other"
    assert mine.attempt != theirs.attempt
    out = grid.report(only(checks(grid.hand_in(mine))))
    assert {i.lab for i in out if isinstance(i, e.ToLab)} == {"lab"}
    assert theirs.attempt in grid.dispatcher.leases.hands
    grid.do(e.TaskCancelled("other", mine.task))
    assert accepted(grid.submit(task(1)))


def test_a_validator_of_one_laboratory_checks_its_results_alone():
    grid = Simulated()
    grid.lab()
    grid.lab("other")
    grid.validator("theirs", lab="other")
    grid.volunteer("a")
    lease = only(leases(grid.submit(task(1))))
    assert not checks(grid.hand_in(lease))
    assert only(checks(grid.validator("ours", lab="lab"))).worker == "ours"


def test_tasks_wait_for_a_laboratory_that_is_away_and_go_after_the_grace(grid):
    lease = only(leases(grid.submit(task(1))))
    grid.do(e.LabLeft("lab"))
    assert not checks(grid.hand_in(lease)), "the validator could not reach its data"
    assert checks(grid.lab())
    grid.submit(task(2))
    grid.do(e.LabLeft("lab"))
    out = grid.wait(grid.limits.lab_grace + 1)
    assert withdrawn(out)
    assert not [i for i in out if isinstance(i, e.ToLab)]
    assert grid.dispatcher.snapshot()["labs"] == {}
    assert not grid.dispatcher.leases.hands


@pytest.mark.parametrize("lab_first", [True, False])
def test_running_attempts_survive_a_gateway_restart(grid, lab_first):
    lease = only(leases(grid.submit(task(1))))
    after = Simulated(seed=1, reputation=Reputation.from_rows(grid.dispatcher.reputation.to_rows(), random.Random(5)))
    after.validator()
    after.lab()
    if lab_first:
        out = after.submit(task(1))
        out += after.volunteer(lease.worker, holding=(lease.attempt,))
    else:
        out = after.volunteer(lease.worker, holding=(lease.attempt,))
        assert after.dispatcher.snapshot()["orphans"] == 1
        out += after.commit(lease)  # finished before the laboratory was back
        out += after.submit(task(1))
    assert not leases(out)
    assert not withdrawn(out)
    check = only(checks(after.commit(lease) + after.upload(lease)))
    assert accepted(after.report(check))


def test_after_a_restart_tasks_wait_for_who_may_have_them_in_hand(grid):
    lease = only(leases(grid.submit(task(1))))
    other = "b" if lease.worker == "a" else "a"
    after = Simulated(seed=1, reputation=Reputation.from_rows(grid.dispatcher.reputation.to_rows(), random.Random(5)))
    after.validator()
    after.lab()
    assert not leases(after.submit(task(1)) + after.volunteer(other))
    assert not withdrawn(after.volunteer(lease.worker, holding=(lease.attempt,)))
    assert leases(after.submit(task(2))) == []
    assert [each.task for each in leases(after.wait(after.limits.settle))] == [task(2).task]
    assert accepted(after.report(only(checks(after.hand_in(lease)))))


def test_who_comes_back_later_than_that_keeps_its_attempt_beside_the_new_one(grid):
    lease = only(leases(grid.submit(task(1))))
    other = "b" if lease.worker == "a" else "a"
    after = Simulated(seed=1, reputation=Reputation.from_rows(grid.dispatcher.reputation.to_rows(), random.Random(5)))
    after.validator()
    after.lab()
    after.submit(task(1))
    after.volunteer(other)
    second = only(leases(after.wait(after.limits.settle)))
    assert not withdrawn(after.volunteer(lease.worker, holding=(lease.attempt,)))
    out = after.report(only(checks(after.hand_in(lease))))
    assert accepted(out)
    assert withdrawn(out) == [(other, second.attempt)]


def test_a_worker_without_a_connection_gets_nothing_new(grid):
    lease = only(leases(grid.submit(task(1))))
    other = "b" if lease.worker == "a" else "a"
    grid.do(e.WorkerAway(other))
    assert {each.worker for n in (2, 3, 4) for each in leases(grid.submit(task(n)))} == {lease.worker}
    assert {each.worker for each in leases(grid.do(e.WorkerBack(other)))} == {other}
    grid.do(e.WorkerAway(lease.worker))
    assert only(checks(grid.hand_in(lease))), "what it had in hand counts"


def test_what_a_worker_without_a_connection_has_in_hand_gets_a_backup_copy_after_a_while(grid):
    lease = only(leases(grid.submit(task(1, flops=1e14))))
    other = "b" if lease.worker == "a" else "a"
    grid.do(e.WorkerAway(lease.worker))
    assert not leases(grid.wait(grid.limits.away - 1))
    backup = only(leases(grid.wait(2)))
    assert (backup.worker, backup.task) == (other, lease.task)
    grid.do(e.WorkerBack(lease.worker))
    out = grid.report(only(checks(grid.hand_in(lease))))
    assert accepted(out)
    assert withdrawn(out) == [(other, backup.attempt)]


def test_the_checks_of_a_validator_that_is_away_are_done_by_another():
    grid = Simulated()
    grid.lab()
    grid.validator("v")
    grid.volunteer("a")
    check = only(checks(grid.hand_in(only(leases(grid.submit(task(1)))))))
    grid.do(e.WorkerAway("v"))
    assert not checks(grid.wait(2 * grid.limits.away)), "there is no other one"
    grid.validator("w")
    again = only(checks(grid.wait(2 * grid.limits.away)))
    assert again.worker == "w"
    grid.do(e.WorkerBack("v"))
    assert not told(grid.report(check), m.TaskAccepted), "it was withdrawn"
    assert accepted(grid.report(again))


def test_orphans_that_nobody_claims_are_withdrawn():
    grid = Simulated()
    attempt = f"{task(1).task}#7"
    assert not withdrawn(grid.volunteer("a", holding=(attempt,)))
    assert withdrawn(grid.wait(grid.limits.orphan_grace + 1)) == [("a", attempt)]
    assert not len(grid.dispatcher.orphans)
    out = grid.volunteer("b", holding=("nonsense", f"{task(2).task}#x", attempt, attempt))
    assert set(withdrawn(out)) == {("b", "nonsense"), ("b", f"{task(2).task}#x")}
    grid.leave("b")
    assert not len(grid.dispatcher.orphans)


def test_a_session_opened_anew_keeps_what_the_worker_has_in_hand(grid):
    lease = only(leases(grid.submit(task(1))))
    grid.leave(lease.worker)
    grid.log.clear()
    out = grid.volunteer(f"{lease.worker}2", owner=f"owner-{lease.worker}", host=f"host-{lease.worker}",
                         network=f"net-{lease.worker}", holding=(lease.attempt,))  # fmt: skip
    assert not withdrawn(out)
    check = only(checks(grid.commit(lease, worker=f"{lease.worker}2") + grid.upload(lease, worker=f"{lease.worker}2")))
    assert accepted(grid.report(check))


def test_nobody_else_can_claim_an_attempt(grid):
    lease = only(leases(grid.submit(task(1))))
    out = grid.volunteer("thief", holding=(lease.attempt,))
    assert withdrawn(out) == [("thief", lease.attempt)]


def test_a_nonsense_speed_makes_no_nonsense_deadline():  # situation 8
    for flops, bandwidth in [(1e30, 1e30), (float("inf"), float("nan")), (-1.0, -1.0), (1e-30, 1e-30), (0.0, 0.0)]:
        grid = Simulated()
        grid.lab()
        machine = m.Machine("h", memory=10**10, flops=flops, bandwidth=bandwidth)
        grid.do(e.WorkerJoined("a", "volunteer", "o", "n", machine))
        lease = only(leases(grid.submit(task(1, flops=1e13))))
        assert grid.limits.lease_least <= lease.deadline <= grid.limits.lease_most


def test_priority_within_a_job_and_fairness_between_laboratories():
    grid = Simulated()
    grid.lab("x")
    grid.lab("y")
    for number in range(20):
        grid.submit(task(f"x{number}", priority=(-number,)), lab="x")
    for number in range(5):
        grid.submit(task(f"y{number}", priority=(number,)), lab="y")
    given = []
    for worker in range(5):
        given += leases(grid.volunteer(f"w{worker}"))
    assert len(given) == 10
    assert [d.task for d in given if d.lab == "x"] == [task(f"x{n}").task for n in range(19, 14, -1)]
    assert [d.task for d in given if d.lab == "y"] == [task(f"y{n}").task for n in range(5)]


def test_tasks_go_where_their_inputs_are():
    grid = Simulated()
    grid.lab()
    grid.validator()
    grid.volunteer("a", slots=1)
    lease = only(leases(grid.submit(task(0, inputs=("row 0", "col 0")))))
    for number in range(1, 4):
        grid.submit(task(number, inputs=(f"row {number}", f"col {number}")))
    grid.submit(task("same row", inputs=("row 0", "col 9")))
    grid.commit(lease, held=[blob("row 0").digest, digest(b"of another task")])
    assert list(grid.dispatcher.leases.pool.all["a"].held) == [blob("row 0").digest]
    assert only(leases(grid.upload(lease))).task == task("same row").task


def test_snapshot_and_offer(grid):
    out = grid.volunteer("c", memory=10**10, slots=4) + grid.wait(2)
    offer = told(out, m.GridOffer)[-1]
    assert (offer.volunteers, offer.validators) == (3, 1)
    assert offer.memory == (4 * 10**9, 4 * 10**9, 25 * 10**8)
    lease = only(leases(grid.submit(task(1))))
    grid.report(only(checks(grid.hand_in(lease))))
    for number in range(2, 12):
        grid.submit(task(number))
    view = grid.dispatcher.snapshot()
    assert view["tasks"]["accepted"] == 1
    assert view["methods"] == {"algebraic": 1}
    assert view["flops"] == 1e9
    assert view["tasks"]["queued"] + view["tasks"]["leased"] == 10
    assert view["queue"] == {"lab": {"job": view["tasks"]["queued"]}}
    assert view["jobs"] == [
        {"lab": "lab", "job": "job", "submitted": 11, "accepted": 1, "failed": 0, "open": 10, "flops": 1e9}
    ]
    one = next(w for w in view["workers"] if w["worker"] == lease.worker)
    assert one["verdicts"]["accepted"] == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"task": "x" * 64},
        {"outputs": (m.ArraySpec((4,), "object"),)},
        {"outputs": (m.ArraySpec((-4,), "float32"),)},
        {"outputs": ()},
        {"flops": float("nan")},
        {"peak": -1},
    ],
)
def test_tasks_that_cannot_be_are_refused_with_a_sentence(grid, bad):
    import msgspec

    failure = only(told(grid.submit(msgspec.structs.replace(task(1), **bad)), m.TaskFailed))
    assert failure.kind == "error"
    assert len(failure.reason) > 10


def test_clones_are_noticed(grid):  # situation 5
    out = grid.volunteer("clone", owner="owner-a", host="host-a", network="elsewhere")
    assert only(records(out, "clone")).worker == "clone"


def test_a_clock_that_goes_backwards_stands_still(grid):
    lease = only(leases(grid.submit(task(1))))
    grid.now -= 500
    assert checks(grid.hand_in(lease))


def test_answers_are_remembered_within_bounds():
    grid = Simulated(limits=Limits(remember=3))
    grid.lab()
    grid.validator()
    grid.volunteer("a")
    for number in range(5):
        grid.report(only(checks(grid.hand_in(only(leases(grid.submit(task(number))))))))
    assert len(grid.dispatcher.outcomes.answers) == 3
    assert told(grid.submit(task(4)), m.TaskAccepted)
    assert leases(grid.submit(task(0)))
