"""`JobActor`: pure bookkeeping."""

from goblin_dask.labnode.actors import InLab, JobActor, Moved, OnGrid
from goblin_dask.labnode.progress import NO_GATEWAY, NO_PARTNER, NO_VALIDATOR, NO_VOLUNTEER, waits
from goblin_dask.messages import GridOffer, Verdict


def verdict(method="algebraic", ratio=0.1, volunteers=("v1",), **more):
    return Verdict(method, ratio, 1e-9, volunteers, bytes_in=100, bytes_out=10, **more)


def test_counts_where_tasks_ran_and_how_they_were_verified():
    actor = JobActor(5)
    actor.report([Moved("a", "queued"), Moved("b", "leased")])
    assert actor.progress()["states"] == {"queued": 1, "leased": 1}
    progress = actor.report(
        [
            OnGrid("a", verdict(), origins=3),
            OnGrid("b", verdict("recompute", 0.7, ("v1", "v2"), rejected=1)),
            InLab("c", "lab", "it did not trace", 2),
            InLab("d", "source"),
        ]
    )
    assert progress["done"] == 4
    assert progress["total"] == 5
    assert progress["states"] == {}
    assert (progress["grid"], progress["grid_origins"]) == (2, 4)
    assert (progress["lab"], progress["lab_origins"]) == (1, 2)
    assert progress["reasons"] == {"it did not trace": 1}
    assert progress["methods"] == {"algebraic": 1, "recompute": 1}
    assert progress["volunteers"] == 2
    assert progress["worst_ratio"] == 0.7
    assert progress["rejected"] == 1
    assert progress["bytes_moved"] == 220


def test_rejected_results_count_before_a_task_is_done():
    actor = JobActor(2)
    progress = actor.report([Moved("a", "leased"), *2 * [Moved("a", "rejected")], Moved("b", "rejected")])
    assert (progress["rejected"], progress["states"]) == (3, {"leased": 1})
    assert actor.report([OnGrid("a", verdict(rejected=2)), InLab("b", "lab")])["rejected"] == 3


def test_what_is_not_there_is_waited_for():
    states = {"queued": 3, "leased": 2, "checking": 1, "uploaded": 4}
    both = GridOffer(volunteers=1, validators=1)
    assert waits(states, both, True) == {NO_PARTNER: 4}
    assert waits(states, GridOffer(0, 0), True) == {NO_PARTNER: 4, NO_VOLUNTEER: 3, NO_VALIDATOR: 1}
    assert waits({"leased": 2}, GridOffer(0, 0), True) == {}
    assert waits({"leased": 2}, both, False) == {NO_GATEWAY: 2}


def test_a_task_that_is_done_again_counts_once():
    actor = JobActor(1)
    actor.report([OnGrid("a", verdict(ratio=0.9))])
    progress = actor.report([OnGrid("a", verdict("recompute", ratio=0.2, volunteers=("v2",)))])
    assert progress["grid"] == 1
    assert progress["methods"] == {"recompute": 1}
    assert progress["volunteers"] == 1
    assert progress["worst_ratio"] == 0.2
    assert actor.report([Moved("a", "queued")])["states"] == {}


def test_is_rebuilt_from_what_is_known():
    happenings = [OnGrid("a", verdict()), InLab("b", "lab", "why")]
    first = JobActor(2)
    first.report(happenings)
    again = JobActor(2, happenings)
    assert again.progress() == first.progress()
    assert again.certificate() == first.certificate()
    assert again.certificate()["methods"]["laboratory"]["parts"] == 1
