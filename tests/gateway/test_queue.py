"""The fair queue: order, fairness, memory classes, and that nothing is lost."""

import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from goblin_dask.gateway.queue import FairQueue, Fit


def push(queue, item, *, lab="lab", job="job", priority=(), need=0, cost=1.0):
    return queue.push(item, lab=lab, job=job, priority=priority, need=need, cost=cost, now=0.0)


def take(queue, limit=1 << 60, fits=lambda item, entry: Fit.YES, rank=lambda item: 1.0, **what):
    return queue.take(limit, fits, rank, **what)


def drain(queue):
    items = []
    while (item := take(queue)) is not None:
        items.append(item)
    return items


def test_priority_then_arrival():
    queue = FairQueue()
    for item, priority in [("c", (2,)), ("a", (1, 5)), ("b", (1, 6)), ("a2", (1, 5))]:
        push(queue, item, priority=priority)
    assert drain(queue) == ["a", "a2", "b", "c"]


def test_laboratories_and_jobs_share_by_cost():
    queue = FairQueue()
    for number in range(100):
        push(queue, ("x", number), lab="x", cost=3.0)
        push(queue, ("y", number), lab="y", job="one")
        push(queue, ("z", number), lab="y", job="two")
    first = [take(queue)[0] for _ in range(40)]
    assert 9 <= first.count("x") <= 11
    assert abs(first.count("y") - first.count("z")) <= 1


def test_who_comes_later_gets_no_credit_for_before():
    queue = FairQueue()
    for number in range(100):
        push(queue, ("x", number), lab="x")
    for _ in range(50):
        take(queue)
    for number in range(100):
        push(queue, ("y", number), lab="y")
    first = [take(queue)[0] for _ in range(20)]
    assert 9 <= first.count("x") <= 11


def test_memory_is_a_limit_and_small_workers_do_not_search():
    queue = FairQueue()
    for _ in range(1000):
        push(queue, "large", need=1 << 40, priority=(0,))
    push(queue, "small", need=1000, priority=(1,))
    looked = []
    assert take(queue, 1 << 20, lambda item, entry: looked.append(item) or Fit.YES) == "small"
    assert looked == ["small"]
    assert take(queue, 1 << 20) is None
    assert len(list(queue.beyond(1 << 20, 1))) == 1000
    assert list(queue.beyond(1 << 40, 1)) == []


def test_the_best_of_a_window():
    queue = FairQueue()
    for number in range(10):
        push(queue, number, priority=(number,))
    assert take(queue, rank=lambda item: 10.0 - item, window=4) == 3
    assert take(queue, rank=lambda item: 10.0 - item, window=1) == 0
    assert drain(queue) == [1, 2, 4, 5, 6, 7, 8, 9]


def test_waiting_for_one_entry_takes_nothing_else():
    queue = FairQueue()
    push(queue, "large", lab="x", cost=0.0)
    for number in range(5):
        push(queue, number, lab="y")
    assert take(queue, fits=lambda item, entry: Fit.WAIT if item == "large" else Fit.YES) is None
    assert len(queue) == 6


def test_paused_laboratories_wait():
    queue = FairQueue()
    push(queue, "x", lab="x")
    push(queue, "y", lab="y")
    queue.pause("x")
    assert drain(queue) == ["y"]
    queue.pause("x", False)
    assert drain(queue) == ["x"]
    push(queue, "x", lab="x")
    assert take(queue, lab="y") is None
    assert take(queue, lab="x") == "x"
    queue.forget("x")
    assert queue.depth() == {}


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_nothing_is_lost_or_doubled(seed):
    rng = random.Random(seed)
    queue, entries = FairQueue(), {}
    for number in range(rng.randrange(300)):
        dice = rng.random()
        if dice < 0.5 or not entries:
            lab, job = rng.choice("xyz"), rng.choice("12")
            entries[number] = push(queue, number, lab=lab, job=job, priority=(rng.randrange(5),),
                                   need=rng.randrange(1 << 20), cost=rng.random())  # fmt: skip
        elif dice < 0.75:
            key = rng.choice(list(entries))
            queue.discard(entries[key])
            queue.discard(entries.pop(key))
        else:
            limit = rng.randrange(1 << 20)

            def fits(item, entry, limit=limit):
                return Fit.YES if entry.need <= limit else Fit.NO

            item = take(queue, limit, fits, lambda i: i % 7, scan=1000, window=3, lab=rng.choice(["", "x"]))
            if item is not None:
                assert entries.pop(item).need <= limit
        assert len(queue) == len(entries) == sum(sum(jobs.values()) for jobs in queue.depth().values())
    assert sorted(drain(queue)) == sorted(entries)


def test_time_grows_with_the_logarithm():
    def seconds(count):
        queue = FairQueue()
        for number in range(count):
            push(queue, number, priority=(number * 7919 % count,), job=str(number % 10))
        begin = time.process_time()
        for number in range(2000):
            push(queue, number, priority=(number,))
            take(queue, window=4)
        return time.process_time() - begin

    small, large = min(seconds(1000) for _ in range(3)), min(seconds(100_000) for _ in range(2))
    assert large < 8 * small, f"{small:.3f} s with 1,000 entries, {large:.3f} s with 100,000"
