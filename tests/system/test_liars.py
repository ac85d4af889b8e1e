"""One of three volunteers lies: nothing that it made up is used, and it is soon asked no more."""

import itertools
import json
import sqlite3
import threading
import time
import urllib.request
from dataclasses import dataclass
from operator import itemgetter

import dask.array as da
import msgspec
import numpy as np
import pytest

from goblin_dask.local import LocalGrid
from goblin_dask.store.ledger import Entry
from goblin_dask.testing.liar import confessions
from goblin_dask.verify.reputation import LIES

pytestmark = [pytest.mark.system, pytest.mark.timeout(3600)]

STRATEGIES = (
    *(("entry", times) for times in (1.0, 3.0, 10.0)),
    *(("low_rank", times) for times in (3.0, 10.0)),
    *((name, None) for name in ("zeros", "permuted", "sign", "old_result", "another_chunk", "panel")),
    *((name, None) for name in ("nan", "dtype", "shape")),
    *((name, None) for name in ("sleeper", "lazy", "withholding")),
)
CASES = list(itertools.product(STRATEGIES, ("products", "recomputed")))
FAINT = list(itertools.product((("entry", 0.1), ("entry", 0.3)), ("products", "recomputed")))
"""Below what checks promise to find."""

AT = 1.001
"""Thresholds: an error that is meant to be just one is rounded like any number."""
HONEST = 2
JOBS = 20
"""At most, until a liar has lied often enough."""


class Grid:
    """Two honest volunteers, and one liar after the other."""

    def __init__(self, directory):
        self.grid = LocalGrid(volunteers=HONEST, offload="always", directory=directory, progress=False)
        self.lab, self.directory = self.grid.lab, directory
        self.rng = np.random.default_rng(20260101)
        self._numbers = itertools.count()

    def lie(self, monkeypatch, strategy, *, share=1.0, times=None, seed=0):
        """Have the third volunteer lie; the one before it leaves."""
        self.dismiss()
        number = next(self._numbers)
        journal = self.directory / f"journal-{number}"
        options = {"strategy": strategy, "journal": str(journal), "share": share, "seed": seed}
        if times is not None:
            options["times"] = times
        for name, value in options.items():
            monkeypatch.setenv(f"DASK_GOBLIN__TESTING__LIAR__{name.upper()}", str(value))
        process = self.grid.add_volunteer("--preload", "goblin_dask.testing.liar")
        owner = f"volunteer {len(self.grid.volunteers) - 1}"
        self.grid.wait(3, 1)
        return Liar(self, process, owner, journal)

    def dismiss(self):
        for process in self.grid.volunteers[2:]:
            process.stop()
        eventually(lambda: self.lab.offer.volunteers == 2, "the last liar has left")

    def rows(self, query, *arguments):
        with sqlite3.connect(f"file:{self.directory / 'gateway.sqlite'}?mode=ro", uri=True) as connection:
            connection.row_factory = sqlite3.Row
            found = connection.execute(query, arguments).fetchall()
        connection.close()
        return found

    def status(self):
        """What the gateway shows of itself, no older than this call."""
        now, found = time.time(), {}

        def fresh():
            with urllib.request.urlopen(
                self.grid.address.replace("goblin:", "http:") + "/goblin/status.json"
            ) as answer:
                found.update(json.load(answer))
            return found["time"] >= now

        eventually(fresh, "a status of the gateway")
        return found

    def accepted(self):
        """Digests and shapes of all outputs that the laboratory has accepted."""
        (path,) = self.directory.glob("lab/**/ledger*.sqlite")
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        found = connection.execute("SELECT entry FROM accepted").fetchall()
        connection.close()
        decoder = msgspec.msgpack.Decoder(Entry)
        return {(ref.digest, ref.spec) for (entry,) in found for ref in decoder.decode(entry).outputs}

    # --- work: blocks of different shapes, so that each is a program and a task of its own ---------------------------
    def products(self, n=4, k=900):
        edges = tuple(380 + 4 * i for i in range(n)), tuple(360 + 4 * i for i in range(n))
        a = self.rng.standard_normal((sum(edges[0]), k), np.float32)
        b = self.rng.standard_normal((k, sum(edges[1])), np.float32)
        product = da.from_array(a, (edges[0], (k // 2, k - k // 2))) @ da.from_array(
            b, ((k // 2, k - k // 2), edges[1])
        )
        a, b = a.astype(np.float64), b.astype(np.float64)
        return product, a @ b, 2 * k * 2.0**-24 * (np.abs(a) @ np.abs(b))

    def recomputed(self, n=5):
        edges = tuple(60 + 7 * i for i in range(n)), tuple(50 + 6 * i for i in range(n))
        x = self.rng.standard_normal((sum(edges[0]), sum(edges[1])))
        y = self.rng.standard_normal(x.shape)
        both = da.from_array(x, edges) * 2 + da.exp(da.from_array(y, edges))
        row = self.rng.standard_normal((sum(edges[0]), 90))
        ordered = da.map_blocks(np.sort, da.from_array(row, (edges[0], -1)), axis=1, dtype=row.dtype)
        wide = da.concatenate([both, ordered], axis=1)
        exact = np.concatenate([x * 2 + np.exp(y), np.sort(row, axis=1)], axis=1)
        return wide, exact, 32 * 2.0**-53 * (1 + np.abs(exact))

    def chained(self, n=5, least=40):
        """Tasks that read other tasks' results: a lie that is used spreads. Blocks from 91 on travel as blobs."""
        edges = tuple(least + 7 * i for i in range(n))
        x = self.rng.standard_normal((sum(edges), sum(edges)))
        z = da.exp(da.from_array(x, (edges, edges)))
        exact = np.exp(x)
        return z + z.T, exact + exact.T, 32 * 2.0**-53 * exact.max()


@dataclass
class Liar:
    grid: Grid
    process: object
    owner: str
    journal: object

    @property
    def lies(self):
        return [one for one in confessions(self.journal) if one.lie]

    @property
    def answers(self):
        return len(confessions(self.journal))

    def enough(self, lies):
        """Whether it has lied so often, or is asked no more."""
        return len(self.lies) >= lies or self.barred()

    def barred(self):
        """Whether the database says that it is in quarantine."""
        record = self.record()
        return bool(record and record["quarantined"])

    def record(self):
        """What the gateway's database says of it."""
        (row,) = self.grid.rows("SELECT * FROM reputations WHERE owner = ?", self.owner) or [None]
        return row

    def verdicts(self):
        """What the gateway thinks of the volunteers: of this one, which joined last, and of the others."""
        volunteers = [each for each in self.grid.status()["workers"] if each["role"] == "volunteer"]
        if len(volunteers) == HONEST:  # its session was closed: it is in quarantine
            eventually(self.barred, "a quarantine stands in the database")
            return {"state": "quarantined", **dict(self.record())}, volunteers
        return min(volunteers, key=itemgetter("seconds")), sorted(volunteers, key=itemgetter("seconds"))[1:]


def eventually(condition, what, seconds=20.0):
    """Wait until a fact has reached the database or the laboratory: both are told of it a little later."""
    begun, pause = time.monotonic(), threading.Event()
    while not condition():
        if time.monotonic() - begun > seconds:
            pytest.fail(f"not within {seconds:.0f} s: {what}")
        pause.wait(0.05)


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    grid = Grid(tmp_path_factory.mktemp("liars"))
    yield grid
    grid.grid.close()


@dataclass
class Outcome:
    ratio: float
    """Largest error over the tolerance."""
    beyond: float
    """Largest error beyond it."""
    certificate: dict


def compute(grid, work, **options):
    """Compute one piece of work, and compare it with NumPy in double precision."""
    collection, exact, tolerance = work
    with grid.lab.submit(collection, **options) as job:
        result, certificate = job.result(), job.certificate
    assert (result.shape, result.dtype) == (exact.shape, collection.dtype)
    error = np.abs(result.astype(np.float64) - exact)
    assert np.isfinite(error).all()
    return Outcome(float(np.max(error / tolerance)), float(np.max(error - tolerance)), certificate)


def methods(outcome):
    return {name: method["parts"] for name, method in outcome.certificate["methods"].items()}


def check_liar(grid, liar):
    """What must hold of every liar: its lies unused, itself in quarantine after three were proven, others unblamed."""
    accepted = grid.accepted()
    used = [lie for lie in liar.lies if accepted.intersection(lie.outputs)]
    assert not [lie for lie in used if lie.size > AT], used
    found, honest = liar.verdicts()
    assert len(honest) == HONEST
    assert all(each["state"] != "quarantined" and not each["wrong"] for each in honest), honest
    assert (found["state"] == "quarantined") >= (found["wrong"] >= LIES), found
    if found["state"] == "quarantined":
        eventually(liar.barred, "a quarantine stands in the database")
        reason = liar.record()["quarantined"]
        assert reason in ("a result that no honest machine returns", f"{LIES} results that were proven wrong")
        answers = liar.answers
        compute(grid, grid.chained(2))
        assert liar.answers == answers, "a volunteer in quarantine was asked again"
    return used, found


def run_case(grid, monkeypatch, case, share):
    """Give work to a grid with one liar, until it has lied enough; a line for the report."""
    (strategy, times), kind = case
    begun = time.monotonic()
    liar = grid.lie(monkeypatch, strategy, share=share, times=times, seed=(CASES + FAINT).index(case))
    outcomes = []
    while not outcomes or (len(outcomes) < JOBS and not liar.enough(1 if share < 1 else LIES + 1)):
        outcomes.append(compute(grid, getattr(grid, kind)()))
    lies = liar.lies
    assert lies, f"{strategy} never lied in {liar.answers} answers"
    used, found = check_liar(grid, liar)
    assert all(outcome.certificate["complete"] for outcome in outcomes)
    allowed = max((lie.error for lie in used), default=0.0)
    assert all(outcome.beyond <= allowed for outcome in outcomes), (case, outcomes)
    small = sum(lie.size <= AT for lie in lies)
    return (
        f"{strategy:13} {f'{times:g}×' if times else '':4} {share:4.0%} {kind:10} {len(lies):3} lies of "
        f"{liar.answers:3} answers: {len(used)} of {small} below the threshold used, 0 of {len(lies) - small} above; "
        f"{found['wrong']} proven, {found['unproven']} unproven, "
        f"{'' if found['state'] == 'quarantined' else 'not '}in quarantine; error/tolerance "
        f"{max(outcome.ratio for outcome in outcomes):.3g}; {time.monotonic() - begun:.1f} s"
    )


@pytest.mark.full
def test_who_always_lies(grid, full, sample, report, monkeypatch):
    """The table: each way to lie, where algebra checks and where recomputation does."""
    for case in sample(CASES, 2) + FAINT * full:
        report(run_case(grid, monkeypatch, case, 1.0))


@pytest.mark.full
def test_who_lies_in_five_percent_of_the_answers(grid, full, sample, report, monkeypatch):
    """The same for those who hope to be overlooked."""
    for case in sample(CASES if full else [case for case in CASES if case[1] == "recomputed"], 1):
        report(run_case(grid, monkeypatch, case, 0.05))


def test_replicas_of_a_liar_are_not_used(grid, report, monkeypatch):
    """Each task is done twice; where the two differ, it is found out who was right."""
    liar = grid.lie(monkeypatch, "zeros", seed=1)
    outcome = compute(grid, grid.chained(), verify="replicate")
    used, found = check_liar(grid, liar)
    assert liar.lies
    assert not used
    assert outcome.beyond <= 0
    report(f"replicate: {len(liar.lies)} lies, {found['wrong']} proven; verified by {methods(outcome)}")


def test_sampling_reopens_what_came_from_a_liar(grid, report, monkeypatch):
    """Once one sampled result was wrong, none that its volunteer handed in unchecked is in the job's result."""
    for seed in range(JOBS):
        liar = grid.lie(monkeypatch, "zeros", seed=seed)
        outcome = compute(grid, grid.chained(least=95), verify="sample:0.1")
        _, honest = found = liar.verdicts()
        assert not any(each["wrong"] for each in honest)
        report(
            f"sample:0.1: {len(liar.lies)} lies, {found[0]['wrong']} proven, error/tolerance {outcome.ratio:.3g}; "
            f"verified by {methods(outcome)}"
        )
        if liar.lies and found[0]["wrong"]:
            used, _ = check_liar(grid, liar)
            assert not used
            assert outcome.beyond <= 0
            return
    pytest.fail(f"none of {JOBS} liars was sampled")
