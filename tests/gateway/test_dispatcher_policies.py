"""What the policies mean in the dispatcher: replicas, samples, re-opened results, and a grid with many liars."""

import random

import msgspec
import pytest
from simulated import ENOUGH, Simulated, blob, checks, leases, only, records, task, told, withdrawn

from goblin_dask import messages as m
from goblin_dask.gateway import events as e
from goblin_dask.gateway.limits import Limits
from goblin_dask.verify.reputation import LIES

REPLICATE = m.Policy("replicate")


@pytest.fixture
def grid():
    grid = Simulated()
    grid.lab()
    grid.validator()
    grid.volunteer("a")
    grid.volunteer("b")
    grid.wait(20)
    grid.log.clear()
    return grid


def test_replicas_go_to_two_owners_and_are_compared(grid):
    grid.volunteer("a2", owner="owner-a", network="far")
    grid.volunteer("a3", owner="somebody", network="net-a")
    first, second = leases(grid.submit(task(1, policy=REPLICATE)))
    workers = {first.worker, second.worker}
    assert "b" in workers
    assert len(workers) == 2
    assert not checks(grid.hand_in(first))
    check = only(checks(grid.hand_in(second, (blob("nearly the same"),))))
    assert check.check.method == "compare"
    assert {check.check.outputs, check.check.replica} == {(blob(f"out {first.task}"),), (blob("nearly the same"),)}
    out = grid.report(check)
    answer = only(told(out, m.TaskAccepted))
    assert answer.verdict.method == "replicate"
    assert len(answer.verdict.volunteers) == 2
    assert len(records(out, "accepted")) == 2
    assert len(only(told(out, m.DropUploads)).digests) == 1


def test_a_dispute_is_settled_by_recomputing_both(grid):
    first, second = leases(grid.submit(task(1, policy=REPLICATE)))
    grid.hand_in(first, (blob("lie"),))
    check = only(checks(grid.hand_in(second)))
    both = checks(grid.report(check, "wrong"))
    assert {c.check.method for c in both} == {"auto"}
    right = next(c for c in both if c.check.of == second.attempt)
    out = grid.report(right)
    assert only(told(out, m.TaskAccepted)).outputs == (blob(f"out {second.task}"),)
    wrong = next(c for c in both if c.check.of == first.attempt)
    assert not withdrawn(out), "the liar is still judged"
    out = grid.report(wrong, "wrong")
    assert only(records(out, "wrong")).worker == first.worker
    assert told(out, m.DropUploads)
    assert not leases(out)
    assert grid.dispatcher.snapshot()["labs"]["lab"]["open"] == 0


def test_replicate_with_one_owner_is_recomputed_instead(grid):
    grid.leave("b")
    first = only(leases(grid.submit(task(1, policy=REPLICATE))))
    assert not checks(grid.hand_in(first))
    check = only(checks(grid.wait(2 * grid.limits.patience)))
    assert check.check.method == "recompute"
    assert only(told(grid.report(check), m.TaskAccepted)).verdict.method == "recompute"


def test_a_second_owner_is_waited_for_once_and_not_by_each_task(grid):
    """Of a job whose tasks wait for each other; with more tasks than are looked at to find one."""
    grid.leave("b")
    many = range(2 * grid.limits.scan)

    def work(out):
        while waiting := leases(out):
            out = [further for one in waiting for further in grid.hand_in(one)]

    work([out for number in many for out in grid.submit(task(number, policy=REPLICATE))])
    grid.wait(grid.limits.patience / 2)
    work(grid.wait(grid.limits.patience))
    assert +grid.dispatcher.outcomes.stages == {"checking": len(many)}
    grid.volunteer("a2", owner="owner-a", network="elsewhere")
    first = only(leases(grid.submit(task("next", policy=REPLICATE))))
    grid.hand_in(first)
    assert grid.dispatcher.outcomes.labs["lab"].tickets[first.task].life.stage == "checking"
    grid.volunteer("b", owner="owner-b")
    assert len(leases(grid.submit(task("last", policy=REPLICATE)))) == 2


def test_who_is_in_quarantine_is_no_second_owner(grid):
    reputation = grid.dispatcher.reputation
    for number in range(LIES):
        first, second = leases(grid.submit(task(number, policy=REPLICATE)))
        lie, right = (first, second) if first.worker == "b" else (second, first)
        grid.hand_in(right)
        for check in checks(grid.report(only(checks(grid.hand_in(lie, (blob("lie"),)))), "wrong")):
            grid.report(check, "wrong" if check.check.of == lie.attempt else "accepted")
    assert reputation.hosts[grid.dispatcher.leases.pool.all["b"].record.key].quarantined
    assert not grid.dispatcher.leases.pool.independent
    grid.wait(grid.limits.patience)
    assert (
        only(checks(grid.hand_in(only(leases(grid.submit(task("x", policy=REPLICATE))))))).check.method == "recompute"
    )


def test_replicas_that_agree_have_been_checked(grid):
    first, second = leases(grid.submit(task(1, policy=REPLICATE)))
    grid.hand_in(first)
    grid.report(only(checks(grid.hand_in(second))))
    assert grid.dispatcher.outcomes.unchecked_count == 0
    assert not grid.dispatcher.outcomes.labs["lab"].tickets


def test_a_laboratory_hears_of_each_rejected_result(grid):
    first, second = leases(grid.submit(task(1, policy=REPLICATE)))
    states = [told.state for told in told(grid.hand_in(first), m.TaskProgress)]
    assert states == ["uploaded"]
    one, other = checks(grid.report(only(checks(grid.hand_in(second))), "wrong"))
    assert [told.state for told in told(grid.report(one, "wrong"), m.TaskProgress)] == ["rejected"]
    assert not told(grid.report(other), m.TaskProgress)


def test_replicas_cross_classes_of_machines():
    hits = 0
    for seed in range(20):
        grid = Simulated(seed=seed)
        grid.lab()
        for name in ("a", "b", "c"):
            grid.volunteer(name, versions=(("blas", "one"),))
        grid.volunteer("d", versions=(("blas", "two"),))
        pair = leases(grid.submit(task(1, policy=REPLICATE)))
        hits += "d" in {p.worker for p in pair}
    assert hits == 20


def test_recompute_is_asked_of_the_validator(grid):
    lease = only(leases(grid.submit(task(1, policy=m.Policy("recompute")))))
    assert only(checks(grid.hand_in(lease))).check.method == "recompute"


def test_a_new_host_is_always_checked(grid):
    for number in range(5):
        lease = only(leases(grid.submit(task(number, policy=m.Policy("sample", 0.0)))))
        grid.report(only(checks(grid.hand_in(lease))))
    grid.know("a", "b")
    lease = only(leases(grid.submit(task("late", policy=m.Policy("sample", 0.0)))))
    assert told(grid.hand_in(lease), m.TaskAccepted)


def test_unchecked_results_are_marked_and_are_no_success(grid):
    grid.know("a", "b")
    lease = only(leases(grid.submit(task(1, policy=m.Policy("sample", 0.0)))))
    out = grid.hand_in(lease)
    verdict = only(told(out, m.TaskAccepted)).verdict
    assert (verdict.method, verdict.miss, len(verdict.volunteers)) == ("unchecked", 1.0, 1)
    record = grid.dispatcher.leases.pool.all[lease.worker].record
    assert (record.accepted, record.quota) == (ENOUGH, 2.0)


def test_one_mismatch_reopens_all_that_nobody_checked(grid):
    grid.know("a")
    grid.leave("b")
    unchecked = m.Policy("sample", 0.0)
    given = []
    for number in range(5):
        lease = only(leases(grid.submit(task(number, policy=unchecked))))
        given.append(lease)
        grid.hand_in(lease)
    assert grid.dispatcher.outcomes.unchecked_count == 5
    lease = only(leases(grid.submit(task("sampled"))))
    grid.volunteer("b")
    out = grid.report(only(checks(grid.hand_in(lease, (blob("lie"),)))), "wrong")
    assert {t.task for t in told(out, m.TaskReopened)} == {d.task for d in given}
    assert grid.dispatcher.outcomes.unchecked_count == 0
    again = {c.check.of: c for c in checks(grid.log) if c.attempt in grid.dispatcher.leases.hands}
    assert set(again) <= {d.attempt for d in given}
    while again:
        of, check = again.popitem()
        right = of != given[0].attempt
        out = grid.report(check, "accepted" if right else "wrong")
        assert len(told(out, m.TaskAccepted)) == right
        again |= {c.check.of: c for c in checks(out)}
    redone = leases(grid.log)[-1]
    assert (redone.task, redone.worker) == (given[0].task, "b")
    answer = only(told(grid.report(only(checks(grid.hand_in(redone)))), m.TaskAccepted))
    assert answer.verdict.method == "algebraic"


def test_asking_for_more_than_was_checked_checks_the_kept_result(grid):
    grid.know("a", "b")
    lease = only(leases(grid.submit(task(1, policy=m.Policy("sample", 0.0)))))
    grid.hand_in(lease)
    assert told(grid.submit(task(1, policy=m.Policy("sample", 0.0))), m.TaskAccepted)
    out = grid.submit(task(1))
    assert not told(out, m.TaskAccepted)
    assert not leases(out)
    check = only(checks(out))
    assert check.check.of == lease.attempt
    assert only(told(grid.report(check), m.TaskAccepted)).verdict.method == "algebraic"
    assert told(grid.submit(task(1)), m.TaskAccepted), "now it is known to be checked"


def test_unchecked_results_beyond_what_is_remembered_are_checked():
    grid = Simulated(limits=Limits(remember=2))
    grid.lab()
    grid.validator()
    grid.volunteer("a")
    grid.know("a")
    for number in range(3):
        out = grid.hand_in(only(leases(grid.submit(task(number, policy=m.Policy("sample", 0.0))))))
    assert checks(out)


def test_after_one_lie_every_result_of_the_host_is_recomputed(grid):
    grid.leave("b")
    lease = only(leases(grid.submit(task(1))))
    assert not leases(grid.report(only(checks(grid.hand_in(lease))), "wrong")), "somebody else, if there is anybody"
    again = only(leases(grid.wait(11)))
    assert only(checks(grid.hand_in(again))).check.method == "recompute"


def test_quarantine_takes_everything_out_of_hand(grid):
    grid.know("a", "b")
    one = only(leases(grid.submit(task(1, policy=m.Policy("sample", 0.0)))))
    grid.hand_in(one)
    liar = one.worker
    mine = []
    number = 2
    while len(mine) < 2:
        mine += [d for d in leases(grid.submit(task(number))) if d.worker == liar]
        number += 1
    out = grid.report(only(checks(grid.hand_in(mine[0]))), "wrong", ratio=1e9)
    assert only([i for i in out if isinstance(i, e.Quarantine)]).worker == liar
    assert (liar, mine[1].attempt) in withdrawn(out)
    assert only(told(out, m.TaskReopened)).task == one.task
    assert not [d for d in leases(out + grid.wait(3600)) if d.worker == liar]
    grid.leave(liar)
    grid.log.clear()
    grid.volunteer("again", owner=f"owner-{liar}", host=f"host-{liar}")
    for number in range(50, 60):
        grid.submit(task(number))
    assert not [d for d in leases(grid.log) if d.worker == "again"], "the same host, whatever it calls itself"


@pytest.mark.parametrize("policy", [m.Policy(), m.Policy("sample", 0.2), REPLICATE], ids=lambda p: p.method)
def test_a_fifth_of_liars(policy):
    """Liars of mixed strategies: always, in 5 % of answers, only after earning trust; loud and quiet."""
    rng = random.Random(4)
    grid = Simulated(seed=2)
    grid.lab()
    grid.validator(slots=32)
    strategies = {}
    for number in range(40):
        name = f"w{number:02d}"
        strategies[name] = ["always", "rarely", "sleeper", "loud"][number // 5 % 4] if number % 5 == 0 else "honest"
        grid.volunteer(name)
    answered = dict.fromkeys(strategies, 0)
    proven = dict.fromkeys(strategies, 0)
    truth, accepted, waiting, barred = {}, {}, [], set()

    def absorb(out):
        for i in out:
            if isinstance(i, e.Dispatch):
                assert i.worker not in barred, "a lease for a host in quarantine"
                waiting.append(i)
            elif isinstance(i, e.Quarantine):
                assert 1 <= proven[i.worker] <= LIES
                barred.add(i.worker)
            elif isinstance(i, e.Record) and i.kind == "wrong":
                proven[i.worker] += 1
            elif isinstance(i, e.ToLab) and isinstance(i.message, m.TaskAccepted):
                accepted[i.message.task] = i.message
            elif isinstance(i, e.ToLab) and isinstance(i.message, m.TaskReopened):
                del accepted[i.message.task]

    def lies(name):
        answered[name] += 1
        return {
            "honest": False,
            "always": True,
            "loud": True,
            "rarely": rng.random() < 0.05,
            "sleeper": answered[name] > 20 and rng.random() < 0.5,
        }[strategies[name]]

    for number in range(3000):
        absorb(grid.submit(task(number, policy=policy)))
    while waiting:
        d = waiting.pop(rng.randrange(len(waiting)))
        if d.attempt not in grid.dispatcher.leases.hands:
            continue
        grid.now += 0.01
        if d.check is None:
            lie = lies(d.worker)
            outputs = (blob(f"lie {d.attempt}" if lie else f"right {d.task}"),)
            truth[outputs[0].digest] = not lie
            absorb(grid.hand_in(d, outputs))
        else:
            right = all(truth[o.digest] for o in d.check.outputs + d.check.replica)
            loud = strategies[grid.dispatcher.leases.hands[d.attempt].attempt.holder.worker] == "loud"
            absorb(grid.report(d, "accepted" if right else "wrong", ratio=0.5 if right else 1e6 if loud else 20.0))
        if not waiting:
            absorb(grid.wait(30))
    assert len(accepted) == 3000
    hosts = {w.id: w.record for w in grid.dispatcher.leases.pool.volunteers.values()}
    for name, strategy in strategies.items():
        if strategy == "honest":
            assert not hosts[name].quarantined
            assert proven[name] == 0
        elif strategy in ("always", "loud"):
            assert hosts[name].quarantined
        assert bool(hosts[name].quarantined) == (name in barred)
        assert name in barred or proven[name] < LIES
    wrong = [a for a in accepted.values() if not truth[a.outputs[0].digest]]
    assert all(a.verdict.method == "unchecked" for a in wrong), "nothing that was checked is wrong"
    if policy.method != "sample":
        assert not wrong
    liars = [n for n, s in strategies.items() if s != "honest"]
    assert sum(bool(hosts[n].quarantined) for n in liars) >= len(liars) // 2


def test_messages_of_the_policies_survive_the_wire():
    for policy in (m.Policy(), REPLICATE, m.Policy("sample", 0.1)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(policy), type=m.Policy) == policy
