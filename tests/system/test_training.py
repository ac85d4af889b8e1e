"""Training while processes come, go and are killed, in little memory: the losses are those of a quiet run."""

import os
import random
import sqlite3
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from goblin_dask.errors import GoblinError  # noqa: E402
from goblin_dask.local import LocalGrid  # noqa: E402
from goblin_dask.testing.models import GPT  # noqa: E402
from goblin_dask.training import Trainer  # noqa: E402
from tests.system.bench import RECORDER, Notes  # noqa: E402
from tests.system.test_memory import Sampler  # noqa: E402

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

LIMITED = ("--preload", str(Path(__file__).with_name("limited.py")))
BATCH = 8


def language(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


GIVEN = {"loss": language, "optimizer": lambda p: torch.optim.AdamW(p, lr=3e-3)}


def training():
    """A small language model with dropout and tied weights, and its data."""
    torch.manual_seed(1)
    tokens = torch.randint(0, 64, (40, 25))
    return GPT(64, 24, 48, 2, 3, dropout=0.1), (tokens[:, :-1], tokens[:, 1:])


def trainer(lab, **options):
    return Trainer(training()[0], lab=lab, micro_batch=2, stages=2, seed=5, **GIVEN, **options)


def losses(fitting):
    return [round.loss for round in fitting]


@pytest.fixture(scope="module", autouse=True)
def whole(full):
    if not full:
        pytest.skip("make full runs them")


@pytest.fixture(scope="module")
def quiet(full):
    """Losses of an undisturbed run on one volunteer."""
    rounds = 24 if full else 6
    with LocalGrid(1, 1, progress=False) as grid:
        return losses(trainer(grid.lab).fit(training()[1], rounds=rounds, batch=BATCH, shuffle=True))


@pytest.fixture
def notes(tmp_path, monkeypatch):
    notes = Notes(tmp_path)
    monkeypatch.setenv("GOBLIN_TEST_NOTES", notes.path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    yield notes
    notes.close()


def test_a_volunteer_is_killed_in_each_round_and_another_joins(quiet, notes, tmp_path, report):
    with LocalGrid(0, 1, progress=False, directory=tmp_path / "grid") as grid:
        for _ in range(4):
            grid.add_volunteer(*RECORDER)
        grid.wait(4, 1)
        training_ = trainer(grid.lab)
        fitting = training_.fit(training()[1], rounds=len(quiet), batch=BATCH, shuffle=True)
        found, killed = [], set()
        for _ in quiet:
            mark = notes.mark()
            watch = threading.Thread(target=_kill_who_computes, args=(grid, notes, mark, killed))
            watch.start()
            found.append(next(fitting).loss)
            watch.join()
        assert found == quiet
        assert len(killed) == len(quiet)
        begun = [note for note in notes.since(0, "computes") if note.attempt]
        tasks = {note.task for note in begun}
        report(
            f"churn: {len(quiet)} rounds, {len(killed)} volunteers killed: the losses of a quiet run; "
            f"{len(tasks)} tasks, {len(begun) - len(tasks)} of them begun again"
        )


def _kill_who_computes(grid, notes, mark, killed):
    hit = notes.wait(mark, lambda note: note.what == "computes" and note.pid not in killed)
    next(process for process in grid.volunteers if process.pid == hit.pid).kill()
    killed.add(hit.pid)
    grid.add_volunteer(*RECORDER)


def accepted(directory):
    """Tasks in the lab node's ledger."""
    with sqlite3.connect(f"file:{directory / 'grid/lab/ledger.sqlite'}?mode=ro", uri=True) as ledger:
        return {bytes(task).hex() for (task,) in ledger.execute("SELECT task FROM accepted")}


@pytest.mark.full
@pytest.mark.parametrize("attempt", range(10))
def test_whoever_is_killed_training_resumes(quiet, notes, tmp_path, report, full, attempt):
    """Lab node, gateway or a volunteer is killed at a random moment of a round: at the n-th note of any worker."""
    if attempt and not full:
        pytest.skip("make full does it ten times")
    rng = random.Random(attempt)
    victim = ("lab node", "gateway", "volunteer")[attempt % 3]
    path = tmp_path / "run.zarr"
    with LocalGrid(0, 0, progress=False, directory=tmp_path / "grid") as grid:
        grid.add_validator(*RECORDER)
        for _ in range(2):
            grid.add_volunteer(*RECORDER)
        grid.wait(2, 1)
        first = trainer(grid.lab)
        found = []
        fitting = first.fit(training()[1], rounds=len(quiet), batch=BATCH, shuffle=True)
        for _ in range(rng.randint(1, 2)):
            found.append(next(fitting).loss)
            first.save(path)
        mark, moment = notes.mark(), rng.randrange(3, 60)
        before = []
        watch = threading.Thread(target=_kill, args=(grid, notes, mark, moment, victim, tmp_path, before))
        watch.start()
        interrupted = False
        try:
            for done in fitting:
                found.append(done.loss)
                first.save(path)
        except GoblinError:
            interrupted = True
        watch.join()
        if interrupted:
            resumed = Trainer.resume(path, training()[0], lab=grid.lab, **GIVEN)
            assert resumed.rounds == len(found)
            found += losses(resumed.fit(training()[1], rounds=len(quiet) - len(found), batch=BATCH, shuffle=True))
        assert found == quiet
        assert interrupted is (victim == "lab node")
        kept, killed = before
        # who is told within milliseconds of an acceptance may have begun in them
        begun = {note.task for note in notes.since(mark, "computes") if note.time > killed + 1}
        assert kept
        assert not begun & kept, "what was accepted is computed again"
    report(
        f"{victim} killed at note {moment} of a round: {len(quiet)} losses of a quiet run; "
        f"{len(kept)} accepted before, none computed again"
    )


def _kill(grid, notes, mark, moment, victim, directory, before):
    notes.wait(mark, lambda note: len(notes.all) - mark >= moment)
    before.append(accepted(directory))
    if victim == "lab node":
        grid.kill_lab_node()
        before.append(time.monotonic())
        grid.restart_lab_node()
    elif victim == "gateway":
        grid.kill_gateway()
        before.append(time.monotonic())
        grid.restart_gateway()
    else:
        grid.volunteers[0].kill()
        before.append(time.monotonic())
        grid.add_volunteer(*RECORDER)


@pytest.mark.full
def test_a_model_larger_than_its_volunteers(notes, tmp_path, full, report):
    """``RLIMIT_DATA`` lets a volunteer have its baseline and 1.2 times what its largest task was said to take."""
    layers, width, memory = (24, 512, "72 MB") if full else (12, 192, "5 MB")
    torch.manual_seed(2)
    model = GPT(256, 64, width, 4, layers, dropout=0.0)
    tokens = torch.randint(0, 256, (8, 65))
    size = sum(each.numel() * 4 for each in model.parameters())
    with LocalGrid(0, 1, progress=False, directory=tmp_path / "grid") as grid:
        volunteers = [grid.add_volunteer(*RECORDER, *LIMITED) for _ in range(2)]
        grid.wait(2, 1)
        large = Trainer(
            model, lab=grid.lab, micro_batch=2, volunteer_memory=memory, loss=language,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        )  # fmt: skip
        with Sampler(grid.processes, "RssAnon", "RssShmem") as sampler:
            found = losses(large.fit((tokens[:, :-1], tokens[:, 1:]), rounds=3, batch=4))
        shares = []
        for process in volunteers:
            said = [note.what.split(":") for note in notes.since(0) if note.pid == process.pid and ":" in note.what]
            baseline = next(int(value) for what, value in said if what == "baseline")
            peak = max(int(value) for what, value in said if what == "peak")
            assert size >= 4 * peak
            shares.append((sampler.peaks[process.name] - baseline) / peak)
        failed = [note for note in notes.since(0) if note.what.startswith("AttemptFailed")]
    assert not failed, "a task did not fit into what was projected"
    assert max(shares) <= 1.2
    assert found[-1] < found[0]
    report(
        f"a model of {size / 1e6:.0f} MB on volunteers limited to {peak / 1e6:.1f} MB a task (x 1.2) beside their "
        f"baseline, of which they used {max(shares):.2f}: losses {', '.join(f'{loss:.4f}' for loss in found)}"
    )
