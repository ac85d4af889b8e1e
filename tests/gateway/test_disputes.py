"""Replicas that differ are bisected: real programs, real checks, and no computers."""

import dataclasses
import random

import numpy as np
import pytest
from simulated import Simulated, checks, leases, records, told

from goblin_dask import messages as m
from goblin_dask.digest import digest
from goblin_dask.gateway import events as e
from goblin_dask.graphs.backends.base import NUMPY
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.operators import CATALOGUE
from goblin_dask.graphs.outline import Outline
from goblin_dask.graphs.program import decode, encode
from goblin_dask.store.buffers import buffer_of, spec_of
from goblin_dask.verify.check import check_result
from goblin_dask.verify.effects import Holder
from goblin_dask.verify.scales import Scales
from goblin_dask.volunteer.trace import Trace

LAYERS = 6
REPLICATE = m.Policy("replicate")


def network(layers=LAYERS, width=48):
    """A deep network: product, then tanh, layer by layer."""
    build = Builder()
    x = build.input(m.ArraySpec((32, width), "float32"))
    for _ in range(layers):
        weight = build.input(m.ArraySpec((width, width), "float32"))
        (x,) = build.add("matmul", [x, weight])
        (x,) = build.add("tanh", [x])
    return build.finish([x])[0]


def wrong(name, at, by):
    """NumPy, but the `at`-th application of an operator (by its operands' values) is off by a factor."""
    kernel = CATALOGUE[name].kernel

    def override(xp, operands, attributes):
        results = kernel(xp, operands, attributes)
        return tuple(r * np.float32(by) for r in results) if at(operands) else results

    return dataclasses.replace(NUMPY, overrides={name: override}, inplace=False)


class Computing(Simulated):
    """A grid whose volunteers and validators compute."""

    def __init__(self, program, seed=0, audited=0.0, **more):
        super().__init__(seed=seed, **more)
        self.dispatcher.reputation.audit_rate = lambda host: audited
        self.program, self.encoded = program, encode(program)
        rng = np.random.default_rng(seed)
        self.arrays = [(rng.standard_normal(s.shape) / np.sqrt(s.shape[0])).astype(s.dtype) for s in program.inputs]
        self.blobs = {}
        self.backends, self.pending = {}, []
        self.moved = 0
        self.checked = []
        self.scales = Scales()
        self.lab()
        self.validator(slots=1)

    def join(self, name, backend=NUMPY):
        self.backends[name] = backend
        self.pending += self.volunteer(name, slots=1, versions=(("numpy", name),))

    def keep(self, array):
        buffer = buffer_of(array)
        name = digest(buffer)
        self.blobs[name] = np.array(array)
        return m.BlobRef(name, spec_of(array), buffer.nbytes)

    def compute(self, policy=REPLICATE):
        """Submit the program, and let everybody do what they are told until nothing is left to do."""
        refs = tuple(self.keep(array) for array in self.arrays)
        outline = Outline(self.encoded)
        specs = outline.specs(self.program.outputs)
        task = m.SubmitTask(
            digest(self.encoded + b"task"), digest(self.encoded), refs, specs, 1e9, 10**8, (), policy, "job", True
        )  # fmt: skip
        self.pending += self.do(e.TaskSubmitted("lab", task, outline=outline))
        while self.pending:
            instruction = self.pending.pop(0)
            if isinstance(instruction, e.Dispatch):
                self.pending += self.check(instruction) if instruction.check else self.work(instruction)
        return self.log

    def work(self, order):
        backend = self.backends[order.worker]
        program = decode(order.encoded or self.encoded)
        trace = Trace(backend) if order.reveal is not None and order.reveal.trace else None
        outputs = execute(program, [self.blobs[ref.digest] for ref in order.inputs], backend=backend, observe=trace)
        refs = tuple(self.keep(array) for array in outputs)
        if order.reveal is not None:
            self.moved += sum(ref.nbytes for ref in refs)
            assert tuple(ref.nbytes for ref in refs) == order.reveal.sizes
        digests = self.named(order.worker, trace.digests) if trace is not None else ()
        message = m.Committed(order.attempt, refs, 1.0, digests=tuple(digests))
        return self.do(e.FromWorker(order.worker, message)) + self.upload(order)

    def named(self, worker, digests):
        """What a side of a dispute says that its values are; forgers override it."""
        return digests

    def check(self, order):
        program = decode(order.encoded or self.encoded)
        self.checked.append((order.check.method, len(program.nodes), bool(order.check.values)))

        def get(refs):
            return [self.blobs[ref.digest] for ref in refs]

        report = check_result(
            program, get(order.inputs), get(order.check.outputs), method=order.check.method,
            replica=get(order.check.replica) or None, values=order.check.values, scales=self.scales,
            rng=np.random.default_rng(1),
        )  # fmt: skip
        return self.do(e.FromWorker(order.worker, m.Checked(order.attempt, report)))


def on_layer(arrays, layer):
    weight = arrays[1 + layer]
    return lambda operands: np.array_equal(operands[1], weight)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("liar_first", [True, False])
def test_the_node_at_which_a_liar_went_astray_is_found(layer, liar_first):
    grid = Computing(network(), seed=layer)
    names = ("liar", "honest") if liar_first else ("honest", "liar")
    for name in names:
        grid.join(name, wrong("matmul", on_layer(grid.arrays, layer), 1.001) if name == "liar" else NUMPY)
    log = grid.compute()
    assert [record.worker for record in records(log, "wrong")] == ["liar"]
    assert not told(log, m.TaskAccepted), "the honest result was right where they parted: it waits for a partner"
    whole = [what for what in grid.checked if what[1] == len(grid.program.nodes) and not what[2]]
    assert whole == [("compare", len(grid.program.nodes), False)], "no validator ran the whole program"
    assert [what[:2] for what in grid.checked[-2:]] == [("auto", 1), ("auto", 1)]
    assert len(grid.checked) <= 1 + np.ceil(np.log2(2 * LAYERS)) + 2
    grid.join("third")
    log = grid.compute()
    accepted = told(log, m.TaskAccepted)
    assert len(accepted) == 1
    (right,) = execute(grid.program, grid.arrays)
    np.testing.assert_array_equal(grid.blobs[accepted[0].outputs[0].digest], right)


def test_two_who_are_wrong_at_different_nodes_are_both_found():
    grid = Computing(network(), seed=1)
    grid.join("early", wrong("matmul", on_layer(grid.arrays, 1), 1.01))
    grid.join("late", wrong("tanh", lambda operands: True, 0.99))
    grid.compute()
    blamed = {record.worker for record in records(grid.log, "wrong")}
    assert blamed
    assert blamed <= {"early", "late"}
    assert not told(grid.log, m.TaskAccepted)
    for name in ("x", "y"):
        grid.join(name)
    grid.compute()
    assert len(told(grid.log, m.TaskAccepted)) == 1
    assert not {record.worker for record in records(grid.log, "wrong")} & {"x", "y"}


def test_honest_machines_of_different_classes_agree():
    grid = Computing(network(), seed=2)

    def other_order(xp, operands, attributes):
        a, b = operands
        half = a.shape[1] // 2
        return (a[:, :half] @ b[:half] + a[:, half:] @ b[half:],)

    grid.join("one")
    grid.join("other", dataclasses.replace(NUMPY, overrides={"matmul": other_order}, inplace=False))
    log = grid.compute()
    (accepted,) = told(log, m.TaskAccepted)
    assert accepted.verdict.method == "replicate"
    assert len(accepted.verdict.volunteers) == 2


@pytest.mark.parametrize("forge", [
    lambda digests: [digest(bytes([n])) for n in range(len(digests))],
    lambda digests: digests[1:],
    lambda digests: ["x"] * len(digests),
], ids=["other values", "too few", "no digests"])  # fmt: skip
def test_who_does_not_stand_by_its_values_is_checked_whole(forge):
    grid = Computing(network(), seed=3)
    grid.join("honest")
    grid.join("forger", wrong("matmul", on_layer(grid.arrays, 3), 2))
    grid.named = lambda worker, digests: forge(digests) if worker == "forger" else digests
    log = grid.compute()
    assert [record.worker for record in records(log, "failed")] == ["forger"]
    assert [record.worker for record in records(log, "wrong")] == ["forger"]
    assert len(told(log, m.TaskAccepted)) == 1


def test_who_names_another_value_is_wrong_where_it_does_not_follow():
    grid = Computing(network(), seed=3)
    grid.join("honest")
    grid.join("forger", wrong("matmul", on_layer(grid.arrays, 3), 2))
    grid.named = lambda worker, digests: digests if worker == "honest" else [*digests[:3], digest(b"x"), *digests[4:]]
    assert {record.worker for record in records(grid.compute(), "wrong")} == {"forger"}


def test_who_does_not_compute_its_outputs_again_is_checked_whole():
    grid = Computing(network(), seed=4)
    grid.join("honest")
    grid.join("forger")
    work = grid.work

    def forge(order):
        if order.worker != "forger" or order.reveal is not None:
            return work(order)
        keep, grid.keep = grid.keep, lambda array: type(grid).keep(grid, array * np.float32(1.5))
        try:
            return work(order)
        finally:
            grid.keep = keep

    grid.work = forge
    log = grid.compute()
    (record,) = records(log, "wrong")
    assert (record.worker, record.method) == ("forger", "recompute")
    assert [record.worker for record in records(log, "failed")] == ["forger"]


def test_a_side_that_leaves_during_the_dispute_is_judged_all_the_same():
    grid = Computing(network(), seed=5)
    grid.join("honest")
    grid.join("liar", wrong("matmul", on_layer(grid.arrays, 2), 2))
    work = grid.work

    def leave(order):
        return grid.leave("liar") if order.worker == "liar" and order.reveal is not None else work(order)

    grid.work = leave
    log = grid.compute()
    assert [record.worker for record in records(log, "wrong")] == ["liar"]
    assert len(told(log, m.TaskAccepted)) == 1
    assert not grid.dispatcher.leases.hands


def test_a_task_that_is_cancelled_during_a_dispute_leaves_nothing():
    grid = Computing(network(), seed=6)
    grid.join("honest")
    grid.join("liar", wrong("matmul", on_layer(grid.arrays, 2), 1.01))
    work = grid.work
    done = []

    def cancel(order):
        if order.reveal is not None and not done:
            done.append(order)
            return grid.do(e.TaskCancelled("lab", order.task))
        return work(order)

    grid.work = cancel
    grid.compute()
    assert done
    assert not grid.dispatcher.leases.hands
    assert not told(grid.log, m.TaskAccepted)


def test_an_audit_finds_two_who_have_met():
    grid = Computing(network(), seed=7, audited=1.0)
    for name in ("one", "other"):
        grid.join(name, wrong("matmul", on_layer(grid.arrays, 2), 2))
    log = grid.compute()
    assert {record.worker for record in records(log, "wrong")} == {"one", "other"}
    assert not told(log, m.TaskAccepted)
    assert ("audit", len(grid.program.nodes), False) in grid.checked


def test_two_who_have_met_are_believed_without_an_audit():
    grid = Computing(network(), seed=7)
    for name in ("one", "other"):
        grid.join(name, wrong("matmul", on_layer(grid.arrays, 2), 2))
    assert len(told(grid.compute(), m.TaskAccepted)) == 1


def test_heavy_programs_are_replicated_only_where_there_is_another_owner():
    grid = Computing(network(), seed=8)
    grid.join("one")
    log = grid.compute(m.Policy())
    assert len(told(log, m.TaskAccepted)) == 1
    assert [method for method, *_ in grid.checked] == ["auto"]
    grid = Computing(network(), seed=8)
    grid.join("one")
    grid.join("other")
    log = grid.compute(m.Policy())
    assert told(log, m.TaskAccepted)[0].verdict.method == "replicate"
    assert len(leases(log)) == 2
    assert not [order for order in checks(log) if order.check.method != "compare"]


def test_two_broken_cards_that_agree_on_zeros_are_not_believed():  # situation 3
    grid = Computing(network(), seed=9)
    for name in ("one", "other"):
        grid.join(name, wrong("tanh", lambda operands: True, 0))
    log = grid.compute()
    assert {record.worker for record in records(log, "wrong")} == {"one", "other"}
    assert not told(log, m.TaskAccepted)


def gradients(width=48):
    """Forward and backward of a layer with a squared error: parameters' gradients are the outputs."""
    build = Builder()
    x, weight, wanted = (
        build.input(m.ArraySpec(shape, "float32")) for shape in ((32, width), (width, width), (32, width))
    )
    (z,) = build.add("matmul", [x, weight])
    (y,) = build.add("tanh", [z])
    (error,) = build.add("subtract", [y, wanted])
    (back,) = build.add("tanh_backward", [error, y])
    (turned,) = build.add("permute_dims", [x], axes=(1, 0))
    outputs = [*build.add("matmul", [turned, back]), *build.add("sum", [back], axes=(0,))]
    return build.finish(outputs)[0]


@pytest.mark.parametrize("by", [1000.0, -1.0, 0.0, np.nan], ids=["×1000", "sign", "zero", "NaN"])
def test_a_poisoned_gradient_is_not_used(by):  # situation 6
    grid = Computing(gradients(), seed=10)
    grid.join("honest")
    grid.join("poisoner", wrong("tanh_backward", lambda operands: True, by))
    grid.join("third")
    log = grid.compute()
    assert {record.worker for record in records(log, "wrong")} <= {"poisoner"}
    (accepted,) = told(log, m.TaskAccepted)
    for ref, right in zip(accepted.outputs, execute(grid.program, grid.arrays), strict=True):
        np.testing.assert_array_equal(grid.blobs[ref.digest], right)


def test_who_was_right_in_a_dispute_is_compared_with_a_third_who_waits():
    """A backup copy of a slow replica may have come in meanwhile: then nobody else has to be asked."""
    grid = Computing(network(), seed=11)
    grid.join("honest")
    grid.join("liar", wrong("matmul", on_layer(grid.arrays, 2), 2))
    work, done = grid.work, []

    def third(order):
        if order.reveal is not None and not done:
            (life,) = (ticket.life for ticket in grid.dispatcher.outcomes.labs["lab"].tickets.values())
            outputs = tuple(grid.keep(array) for array in execute(grid.program, grid.arrays))
            done.append(life.lease(f"{order.task}#7", Holder("z", "z", "z", "z", life_key(grid), "z"), grid.now))
            assert not life.commit(f"{order.task}#7", m.Committed(f"{order.task}#7", outputs, 1.0), grid.now)
            assert not life.upload(f"{order.task}#7", suspicious=False, rng=random.Random(0))
        return work(order)

    grid.work = third
    log = grid.compute()
    assert [record.worker for record in records(log, "wrong")] == ["liar"]
    (accepted,) = told(log, m.TaskAccepted)
    assert accepted.verdict.method == "replicate"
    assert "z" in accepted.verdict.volunteers


def life_key(grid):
    """Key of some host that the grid knows."""
    return grid.dispatcher.reputation.host("z", m.Machine("z")).key
