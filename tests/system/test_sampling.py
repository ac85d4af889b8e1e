"""``sample:p``: one sampled lie re-opens all that nobody checked of its volunteer, and no job is done before."""

import dask.array as da
import numpy as np
import pytest

from goblin_dask.digest import digest
from goblin_dask.labnode.execute import Run
from goblin_dask.messages import BlobRef
from goblin_dask.testing.inprocess import InProcessGrid
from goblin_dask.verify.lifecycle import TaskLife
from goblin_dask.verify.reputation import Reputation
from goblin_dask.verify.sampling import SampledRecheck

pytestmark = [pytest.mark.system, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

CHUNKS = 40


class Draw:
    """A generator whose next number is known."""

    def __init__(self, sampled):
        self.sampled = sampled

    def random(self):
        return 0.0 if self.sampled else 1.0


@pytest.mark.parametrize(
    ("lies", "sampled"), [({5}, {5}), ({3, 9}, {9})], ids=["the sampled chunk", "another chunk of its volunteer"]
)
def test_the_only_lie_is_in(tmp_path, monkeypatch, report, lies, sampled):
    """The first volunteer lies in some of its answers; the laboratory draws those in `sampled`, and no others."""
    answers, lied, digests = [], {}, {}

    def tamper(number, runner):
        if number:
            return
        compute = runner._compute

        def lie(program, inputs, attempt, trace):
            outputs, seconds = compute(program, inputs, attempt, trace)
            name = next(name for name, each in runner._attempts.items() if each is attempt)
            answers.append(name)
            if len(answers) in lies:
                lied[name] = len(answers)
                for output in outputs:
                    data = np.frombuffer(output.ref.inline, output.ref.spec.dtype) + 1
                    output.ref = BlobRef(digest(data), output.ref.spec, output.ref.nbytes, data.tobytes())
                    digests[output.ref.digest] = len(answers)
            return outputs, seconds

        runner._compute = lie

    finished, transition, recheck = Run._finished, SampledRecheck.transition, TaskLife.recheck
    drawn, reopened = set(), []

    def noted(run, key, call, outputs):
        if any(digests.get(output.digest) in sampled for output in outputs):
            drawn.add(key)
        return finished(run, key, call, outputs)

    def draw(plugin, key, *args, **kwargs):
        plugin._rng = Draw(key in drawn)
        transition(plugin, key, *args, **kwargs)

    monkeypatch.setattr(Run, "_finished", noted)
    monkeypatch.setattr(SampledRecheck, "transition", draw)
    monkeypatch.setattr(TaskLife, "recheck", lambda life, method: reopened.append(life) or recheck(life, method))
    monkeypatch.setattr(Reputation, "share", lambda reputation, host, flops: float(bool(host.wrong)))
    x = da.from_array(np.random.default_rng(0).random(CHUNKS * 50), chunks=50, name="x")
    with (
        InProcessGrid(
            volunteers=2, fuse=False, directory=tmp_path, tamper=tamper, gateway_config={"probe": False}
        ) as grid,
        grid.lab.submit(da.sqrt(x) * 3, verify="sample:0.1") as job,
    ):
        found = job.result()
        certificate = job.certificate
        hosts = grid.gateway.dispatcher.reputation.hosts.values()
        assert {host.owner for host in hosts if host.wrong} == {"volunteer 0"}
    np.testing.assert_array_equal(found, np.sqrt(x.compute(scheduler="sync")) * 3)
    assert len(lied) == len(lies)
    unchecked = certificate["methods"].get("unchecked", {"parts": 0})
    assert len(reopened) >= min(lied.values()) - 1, "all that it had handed in before"
    assert unchecked.get("miss_probability", 0.9) == 0.9
    assert certificate["policy"] == "sample:0.1"
    report(f"{len(lied)} lies in {len(answers)} answers, {len(reopened)} re-opened; {certificate['summary']}")
