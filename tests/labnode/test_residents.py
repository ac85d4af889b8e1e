"""Actors that researchers keep in the laboratory, against a whole grid in this process."""

import gc
import pickle
import sys
import threading
import tracemalloc
import weakref

import dask
import numpy as np
import pytest
from dask.delayed import Delayed

from goblin_dask.errors import ActorLost, InputError, JobFailed, NotTraceable, Refused
from goblin_dask.labnode import residents
from goblin_dask.labnode.client import Lab
from goblin_dask.labnode.lab_actor import LabActor
from goblin_dask.labnode.node import LabNode
from goblin_dask.labnode.residents import ActorRef, Residents, resident
from goblin_dask.messages import ArraySpec
from goblin_dask.testing.inprocess import InProcessGrid


@pytest.fixture(scope="module")
def grid():
    with InProcessGrid(volunteers=1, offload="always") as grid:
        yield grid


@pytest.fixture
def lab(grid):
    return grid.lab


class Counter:
    def __init__(self, start=0):
        if start < 0:
            raise ValueError("a count is not negative")
        self.count, self.threads = start, set()

    def add(self, number):
        self.count += number
        self.threads.add(threading.current_thread().name)
        return self.count

    def fail(self, text):
        raise LookupError(text)

    def leave(self):
        sys.exit(3)

    async def later(self):
        return 1

    def lock(self):
        return threading.Lock()


def test_an_actor_counts(lab):
    with lab.actor(Counter, 5, name="steps") as counter:
        assert [counter.call("add", n) for n in (1, 2, 3)] == [6, 8, 11]
        (status,) = [each for each in lab.actors() if each["key"] == counter.key]
        assert (status["kind"], status["name"]) == ("Counter", "steps")
    assert counter.key not in [each["key"] for each in lab.actors()]


def test_calls_from_many_threads_run_one_at_a_time(lab):
    class Slow:
        def __init__(self):
            self.inside = self.most = self.calls = 0

        def call(self):
            self.inside += 1
            self.most = max(self.most, self.inside)
            for _ in range(10000):
                pass
            self.inside -= 1
            self.calls += 1
            return self.most, self.calls

    with lab.actor(Slow) as actor:
        threads = [threading.Thread(target=actor.call, args=("call",)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert actor.call("call") == (1, 9)


def test_errors_reach_the_researcher_as_they_are(lab):
    with pytest.raises(ValueError, match="not negative"):
        lab.actor(Counter, -1)
    with lab.actor(Counter) as counter:
        with pytest.raises(LookupError, match="nothing there"):
            counter.call("fail", "nothing there")
        with pytest.raises(AttributeError, match="subtract"):
            counter.call("subtract", 1)
        with pytest.raises(TypeError, match="argument"):
            counter.call("add")
        with pytest.raises(JobFailed, match="SystemExit"):
            counter.call("leave")
        with pytest.raises(InputError, match="coroutine function"):
            counter.call("later")
        with pytest.raises(InputError, match="cannot be sent"):
            counter.call("lock")
        with pytest.raises(InputError, match="an argument of add cannot be sent"):
            counter.call("add", threading.Lock())
        assert counter.call("add", 1) == 1


def test_who_has_no_token_is_not_unpickled(grid):
    seen = []
    with Lab(grid.node.url, "wrong") as stranger:
        with pytest.raises(Refused):
            stranger.actor(Shown, seen.append)
        with pytest.raises(Refused):
            LabActor(stranger, "actor-0").call("add", Shown(seen))
    assert not seen


class Shown:
    def __init__(self, seen):
        self.seen = seen

    def __reduce__(self):
        return print, ("unpickled",)


class Keeper:
    """Holds what it is given."""

    def __init__(self, *arrays):
        self.arrays = list(arrays)

    def get(self):
        return tuple(self.arrays)

    def set(self, *arrays):
        self.arrays = list(arrays)
        return [id(array) for array in arrays]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4),
        np.arange(12).reshape(3, 4).T,
        np.arange(20, dtype=np.complex64)[::3],
        np.zeros((0, 3)),
        np.array(2.5, np.float32),
        np.ma.masked_greater(np.arange(5.0), 2),
        np.array(["a", {}], object),
        np.arange(2**19 + 1, dtype=np.float32),
    ],
    ids=["C", "Fortran", "strided", "empty", "scalar", "masked", "objects", "large"],
)
def test_arrays_come_and_go_as_they_are(lab, array):
    with lab.actor(Keeper, array) as keeper:
        (found,) = keeper.call("get")
        assert type(found) is type(array)
        assert found.dtype == array.dtype
        assert found.flags.writeable
        np.testing.assert_array_equal(found, array)
        keeper.call("set", found, {"more": [found]})
        first, second = keeper.call("get")
        assert second["more"][0] is first


def test_released_ones_are_lost_and_their_memory_is_free(grid, lab):
    keeper = lab.actor(Keeper, np.ones(100))
    kept = grid.node.residents
    held = weakref.ref(grid.node._cluster.worker.state.actors[keeper.key]._instance)
    keeper.release()
    keeper.release()
    with pytest.raises(ActorLost, match="start another"):
        keeper.call("get")
    with pytest.raises(ActorLost):
        LabActor(lab, "actor-of-nobody").call("get")
    assert not kept.status()
    lab.compute(dask.delayed(int)(1))  # a message to the worker, after the one that released the actor
    gc.collect()
    assert held() is None


# --- tasks of graphs ----------------------------------------------------------------------------------------------
class Stage:
    """Parameters, and the sum of what they gave."""

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias
        self.sum, self.order, self.reads = np.zeros(()), [], 0

    def parameters(self):
        self.reads += 1
        return self.weight, {"bias": self.bias}

    def add(self, number, found):
        self.order.append(number)
        self.sum = self.sum + found
        return len(self.order)

    def known(self):
        return self.sum, self.order, self.reads

    def fail(self):
        raise LookupError("no such stage")


class Parameters:
    """A source: reads the parameters of a stage."""

    def __init__(self, stage, specs):
        self.stage, self.specs = stage, specs

    def __call__(self):
        return resident(self.stage).parameters()


def affine(x, parameters):
    weight, more = parameters
    return x @ weight + more["bias"]


def add(stage, number, before, found):
    return stage.call("add", number, found)


SPECS = (ArraySpec((4, 3), "float64"), {"bias": ArraySpec((3,), "float64")})


def a_round(stage, batches, specs=SPECS):
    """What a round of training does: read parameters, compute on volunteers, add up in order."""
    graph = {"parameters": (Parameters(stage, specs),), "sum-0": 0}
    for number, batch in enumerate(batches):
        graph[f"x-{number}"] = batch
        graph[f"y-{number}"] = (affine, f"x-{number}", "parameters")
        graph[f"sum-{number + 1}"] = (add, stage, number, f"sum-{number}", f"y-{number}")
    return Delayed(f"sum-{len(batches)}", graph)


def stage_of(lab, seed=0):
    rng = np.random.default_rng(seed)
    return lab.actor(Stage, rng.random((4, 3)), rng.random(3)), rng.random((5, 2, 4))


def expected(seed=0):
    rng = np.random.default_rng(seed)
    weight, bias = rng.random((4, 3)), rng.random(3)
    return sum(batch @ weight + bias for batch in rng.random((5, 2, 4)))


def test_a_round_reads_an_actor_computes_on_the_grid_and_adds_in_order(grid, lab):
    stage, batches = stage_of(lab)
    with stage, lab.submit(a_round(stage, batches)) as job:
        assert job.result() == 5
        plan = grid.node.jobs[job.id].run.plan
        assert plan.specs["parameters"] == SPECS
        assert sum(task.origins for task in plan.grid) == job.progress["grid_origins"] == 5
        assert not any(task.key.startswith("y-") for task in plan.dynamic)
        total, order, reads = stage.call("known")
        assert order == [0, 1, 2, 3, 4]
        assert reads == 1  # and none while the graph was lowered
        np.testing.assert_allclose(total, expected(), rtol=1e-12)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ((ArraySpec((4, 2), "float64"), {"bias": ArraySpec((2,), "float64")}), r"float64 \(4, 2\).*float64 \(4, 3\)"),
        ((ArraySpec((4, 3), "float32"), {"bias": ArraySpec((3,), "float32")}), "float32.*but it returned.*float64"),
        ([ArraySpec((4, 3), "float64"), {"bias": ArraySpec((3,), "float64")}], "list of .* returned tuple of"),
    ],
    ids=["shapes", "dtypes", "tree"],
)
def test_a_source_that_returns_what_it_did_not_declare_fails_the_job(lab, specs, message):
    stage, batches = stage_of(lab)
    with stage, pytest.raises(InputError, match=f"the source 'parameters' declares .*{message}"):
        lab.compute(a_round(stage, batches, specs))


@pytest.mark.parametrize("specs", ["a word", 3, (ArraySpec((1,), "float64"), object()), ArraySpec((1,), "no dtype")])
def test_specs_of_another_meaning_are_none(lab, specs):
    stage, batches = stage_of(lab)
    with stage:
        assert lab.compute(a_round(stage, batches, specs)) == 5


def test_a_graph_that_is_run_again_calls_again(grid, lab, monkeypatch):
    """A sampled result was wrong: actors are asked and told anew, and tell repetitions by their numbers."""
    settled = grid.node._cluster.settled
    rounds = []

    async def wrong_at_first(run, plugin):
        rounds.append(run)
        found = await settled(run, plugin)
        return ("grid-of-a-liar",) if len(rounds) == 1 else found

    monkeypatch.setattr(grid.node._cluster, "settled", wrong_at_first)
    stage, batches = stage_of(lab, seed=1)
    with stage:
        assert lab.compute(a_round(stage, batches), verify="sample:0.5") == 10
        _, order, reads = stage.call("known")
        assert order == [0, 1, 2, 3, 4] * 2
        assert reads == len(rounds) == 2


def test_tasks_see_the_very_same_objects(lab):
    def exchange(keeper, x):
        given = np.array(x)
        assert resident(keeper).set(given) == [id(given)]
        assert resident(keeper).get()[0] is given
        return given

    with lab.actor(Keeper) as keeper:
        lab.compute(dask.delayed(exchange)(keeper, np.arange(3)))
        np.testing.assert_array_equal(keeper.call("get")[0], np.arange(3))


def test_errors_of_an_actor_fail_the_job_as_they_are(lab):
    stage, _ = stage_of(lab)
    with stage, pytest.raises(LookupError, match="no such stage"):
        lab.compute(dask.delayed(lambda stage: stage.call("fail"))(stage))


def test_an_actor_is_not_told_twice(lab):
    class Overwrites:
        def __init__(self):
            self.calls = 0

        def change(self, array):
            self.calls += 1
            array += 1

        def count(self):
            return self.calls

    # Functions that change what they are given are called again on copies, and this one has told an actor already.
    with lab.actor(Overwrites) as actor:
        with pytest.raises(ValueError, match="read-only"):
            lab.compute(dask.delayed(lambda actor, x: actor.call("change", x))(actor, dask.delayed(np.ones)(100)))
        assert actor.call("count") == 1


def test_a_lost_actor_fails_the_job(lab):
    stage, batches = stage_of(lab)
    stage.release()
    with pytest.raises(ActorLost, match=stage.key):
        lab.compute(a_round(stage, batches))


def test_whoever_waits_for_a_released_actor_is_told(lab):
    entered, go_on = threading.Event(), threading.Event()
    residents.tests = entered, go_on  # by reference, for a class is pickled by value
    try:
        check_that_waiters_are_told(lab)
    finally:
        go_on.set()
        del residents.tests


def check_that_waiters_are_told(lab):
    class Waits:
        def wait(self):
            entered, go_on = residents.tests
            entered.set()
            go_on.wait()

    actor = lab.actor(Waits)
    with lab.submit(dask.delayed(lambda actor: actor.call("wait"))(actor)) as job:
        residents.tests[0].wait()
        actor.release()
        with pytest.raises(ActorLost):
            job.result()


def test_two_researchers_share_an_actor(grid, lab):
    with Lab(grid.node.url, grid.node.token) as other, lab.actor(Counter) as counter:
        theirs = LabActor(other, counter.key)
        assert [counter.call("add", 1), theirs.call("add", 1), counter.call("add", 1)] == [1, 2, 3]
        with other.actor(Counter, 10) as own:
            assert own.call("add", 1) == 11
            assert counter.call("add", 1) == 4
        theirs.release()
        with pytest.raises(ActorLost):
            counter.call("add", 1)


def test_an_actor_is_pickled_as_its_key(lab):
    with lab.actor(Counter) as counter:
        ref = pickle.loads(pickle.dumps(counter))
        assert ref == ActorRef(counter.key)
        with pytest.raises(NotTraceable, match="run in the laboratory"):
            ref.call("add", 1)
        with pytest.raises(NotTraceable):
            resident(counter.key)


# --- how long they live --------------------------------------------------------------------------------------------
def test_idle_ones_and_the_oldest_of_many_go(grid, lab, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(grid.node, "residents", Residents(grid.node._cluster, clock=lambda: now[0]))
    monkeypatch.setattr(residents, "KEPT_ACTORS", 2)

    def there(*actors):
        keys = [status["key"] for status in lab.actors()]
        return [actor.key in keys for actor in actors]

    first = lab.actor(Counter)
    now[0] = 1.0
    second = lab.actor(Counter)
    now[0] = 2.0
    first.call("add", 1)
    third = lab.actor(Counter)  # the one that was called longest ago goes
    assert there(first, second, third) == [True, False, True]
    now[0] = residents.IDLE_SECONDS + 1.0
    first.call("add", 1)
    now[0] = residents.IDLE_SECONDS + 3.0
    grid.run_in_lab(grid.node.residents.sweep())
    assert there(first, third) == [True, False]
    first.release()


def test_a_lab_node_that_was_restarted_has_lost_them(tmp_path):
    with InProcessGrid(volunteers=0, validators=0, directory=tmp_path) as grid:
        counter = grid.lab.actor(Counter)
        assert counter.call("add", 1) == 1
        old = grid.node
        grid.run_in_lab(old.close())
        grid.node = LabNode(
            old.gateway, old._gateway_token, directory=old.directory, port=int(old.url.rpartition(":")[2])
        )
        grid.run_in_lab(grid.node.start())
        with pytest.raises(ActorLost, match="restarted"):
            counter.call("add", 1)
        counter.release()
        assert grid.lab.actor(Counter).call("add", 1) == 1


def test_a_worker_that_dies_takes_its_actors_along(tmp_path):
    with InProcessGrid(volunteers=0, validators=0, directory=tmp_path) as grid:
        counter = grid.lab.actor(Counter)
        assert counter.call("add", 1) == 1
        cluster = grid.node._cluster
        cluster._main.run(cluster.worker.close(nanny=False)).result()
        with pytest.raises(ActorLost):
            counter.call("add", 1)


def test_arrays_are_copied_once_on_their_way(lab):
    """From the socket to where they stay; the sender makes none, and within the laboratory there is none."""
    array = np.ones(2**22)
    with lab.actor(Keeper) as keeper:
        keeper.call("set", array[:2])
        tracemalloc.start()
        try:
            peaks = []
            for send in (lambda: keeper.call("set", array), lambda: keeper.call("get")):
                before, _ = tracemalloc.get_traced_memory()
                tracemalloc.reset_peak()
                send()
                peaks.append((tracemalloc.get_traced_memory()[1] - before) / array.nbytes)
        finally:
            tracemalloc.stop()
    assert max(peaks) < 1.25, peaks
