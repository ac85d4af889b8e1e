"""The life of one task, without a dispatcher."""

import random

import pytest

from goblin_dask import messages as m
from goblin_dask.digest import digest
from goblin_dask.verify import effects as fx
from goblin_dask.verify.lifecycle import DISTINCT_HOSTS, FAILURES, REJECTIONS, TaskLife, mismatch

SPEC = m.ArraySpec((512, 512), "float32")
RNG = random.Random(0)
AUTO = m.Policy()


def blob(name):
    return m.BlobRef(digest(name.encode()), SPEC, 1 << 20)


def holder(name, owner=None):
    return fx.Holder(name, owner or name, f"net {name}", f"host {name}", f"key {name}", f"id {name}")


def life(policy=AUTO, peak=1000, heavy=False):
    one = m.SubmitTask(digest(b"t"), digest(b"p"), (blob("in"),), (SPEC,), 1e9, peak, (), policy, "job", heavy=heavy)
    return TaskLife("lab", one, 0.0)


def lease(one, name, owner=None):
    return one.lease(f"t#{name}", holder(name, owner), 0.0)


def hand_in(one, name, outputs=None, **known):
    effects = one.commit(f"t#{name}", m.Committed(f"t#{name}", outputs or (blob(f"out {name}"),), 1.0), 0.0)
    return effects + one.upload(f"t#{name}", **{"suspicious": False, "rng": RNG, **known})


def judge(one, effects, verdict, ratio=0.5, method="algebraic"):
    out = []
    for number, effect in enumerate([x for x in effects if isinstance(x, fx.Judge)]):
        name = f"c#{random.random()}{number}"
        one.start_check(name, effect.attempt)
        out += one.report(name, m.CheckReport(verdict, method, ratio, seconds=1.0), "v", 0.0)
    return out


def kinds(effects):
    return [type(effect).__name__ for effect in effects]


def test_the_plain_life():
    one = life()
    assert (one.wanted, one.stage) == (1, "queued")
    lease(one, "a")
    assert (one.wanted, one.stage) == (0, "leased")
    effects = hand_in(one, "a")
    assert kinds(effects) == ["Judge"]
    assert one.stage == "checking"
    assert kinds(judge(one, effects, "accepted")) == ["Credit", "Accepted"]
    assert (one.state, one.settled) == ("accepted", True)


def test_a_lost_attempt_is_wanted_again_and_its_host_may_finish_it():
    one = life()
    lease(one, "a")
    assert kinds(one.lose("t#a")) == ["Charge"]
    assert one.wanted == 1
    assert one.revive("t#a", holder("thief")) is None
    assert one.revive("t#a", holder("a")) is not None
    assert one.wanted == 0
    assert kinds(hand_in(one, "a")) == ["Judge"]


def test_an_attempt_lost_between_commitment_and_upload_is_revived_as_committed():
    one = life()
    lease(one, "a")
    message = m.Committed("t#a", (blob("x"),), 1.0)
    one.commit("t#a", message, 0.0)
    one.lose("t#a")
    one.revive("t#a", holder("a"))
    assert kinds(one.commit("t#a", message, 0.0)) == ["Ignored"]
    assert kinds(one.upload("t#a", suspicious=False, rng=RNG)) == ["Judge"]


def test_losses_count_by_host():
    one = life()
    for _ in range(FAILURES - 1):
        lease(one, "a")
        assert "Failed" not in kinds(one.lose("t#a"))
    lease(one, "b")
    assert "Failed" in kinds(one.lose("t#b")), "there is an end all the same"
    one = life()
    for number in range(DISTINCT_HOSTS):
        lease(one, str(number))
        effects = one.lose(f"t#{number}")
    failed = next(x for x in effects if isinstance(x, fx.Failed))
    assert (failed.kind, failed.forgive) == ("lost", ("key 0", "key 1", "key 2"))


def test_three_losses_do_not_end_a_task_with_a_result_under_check():
    one = life()
    lease(one, "a")
    effects = hand_in(one, "a")
    for number in range(DISTINCT_HOSTS):
        lease(one, str(number))
        assert "Failed" not in kinds(one.lose(f"t#{number}"))
    assert "Accepted" in kinds(judge(one, effects, "accepted"))


def test_a_task_that_everybody_gets_wrong_is_not_the_volunteers_fault():
    one = life()
    for number in range(REJECTIONS):
        lease(one, str(number))
        effects = judge(one, hand_in(one, str(number)), "wrong")
    assert next(x for x in effects if isinstance(x, fx.Failed)).kind == "unverifiable"


def test_unproven_excludes_the_owner():
    one = life()
    lease(one, "a")
    assert kinds(judge(one, hand_in(one, "a"), "unproven")) == ["Doubt"]
    assert not one.permits(holder("a2", owner="a"), 0.0)
    assert one.permits(holder("b"), 0.0)
    assert one.wanted == 1
    lease(one, "b")
    effects = judge(one, hand_in(one, "b"), "unproven")
    assert kinds(effects) == ["Doubt", "Judge"]
    assert effects[1].attempt.order.method == "recompute"
    assert "Failed" in kinds(judge(one, effects, "unproven"))


@pytest.mark.parametrize("ratio", [float("nan"), -1.0])
def test_accepted_without_a_ratio_is_not_accepted(ratio):
    one = life()
    lease(one, "a")
    assert kinds(judge(one, hand_in(one, "a"), "accepted", ratio)) == ["Judge"]


def test_cancelling_stops_and_drops():
    one = life()
    lease(one, "a")
    lease(one, "b")
    hand_in(one, "b")
    assert sorted(kinds(one.cancel())) == ["Drop", "Stop"]
    assert (one.wanted, one.state) == (0, "cancelled")


def test_what_is_dropped_is_nobody_elses():
    one = life()
    lease(one, "a")
    lease(one, "b")
    hand_in(one, "a", (blob("same"),))
    effects = judge(one, hand_in(one, "b", (blob("same"),)), "accepted")
    assert "Accepted" in kinds(effects)
    assert "Drop" not in kinds(effects), "the other attempt's upload is the accepted blob"


def test_rechecking_an_unchecked_result():
    one = life(m.Policy("sample", 0.0))
    lease(one, "a")
    effects = hand_in(one, "a")
    assert kinds(effects) == ["Accepted"]
    assert one.unchecked is not None
    effects = one.recheck("auto")
    assert kinds(effects) == ["Judge"]
    assert (one.state, one.unchecked) == ("open", None)
    assert kinds(judge(one, effects, "wrong")) == ["Blame", "Drop"]
    assert one.wanted == 1
    assert one.recheck("auto") == []


def test_a_sampled_heavy_program_is_replicated_and_what_was_used_stays():
    one = life(m.Policy("sample", 0.1), heavy=True)
    lease(one, "a")
    assert kinds(hand_in(one, "a")) == ["Accepted"]
    assert one.recheck("auto") == []
    assert (one.state, one.wanted) == ("open", 1), "another owner's replica is the check"
    assert not one.ever_permits(holder("again", owner="a"))
    one.lease("t#b", holder("b"), 1.0)
    effects = judge(one, hand_in(one, "b"), "accepted", method="replicate")
    accepted = next(effect for effect in effects if isinstance(effect, fx.Accepted))
    assert accepted.outputs == (blob("out a"),), "an honest replica that rounds otherwise changes nothing"
    assert [effect.attempt.holder.owner for effect in effects if isinstance(effect, fx.Credit)] == ["b", "a"]
    assert kinds(effects).count("Drop") == 1


def test_a_sampled_heavy_program_of_a_new_host_is_replicated_before_it_is_used():
    one = life(m.Policy("sample", 0.1), heavy=True)
    lease(one, "a")
    assert hand_in(one, "a", share=1.0) == []
    assert one.wanted == 1
    alone = life(m.Policy("sample", 0.1), heavy=True)
    alone.alone = True
    lease(alone, "a")
    assert kinds(hand_in(alone, "a", share=1.0)) == ["Judge"]


def test_memory_is_learnt_but_not_believed_without_bound():
    one = life(peak=1000)
    lease(one, "a")
    one.fail("t#a", m.AttemptFailed("t#a", "memory", "too big", needs=1500), 0.0)
    assert one.need == 1500
    assert not one.ever_permits(holder("a"))
    lease(one, "b")
    one.fail("t#b", m.AttemptFailed("t#b", "memory", "too big", needs=10**18), 0.0)
    assert one.need == 4000
    failed = next(x for x in one.stuck(3000) if isinstance(x, fx.Failed))
    assert (failed.kind, failed.needs) == ("too_large", 4000)


def test_nobody_is_stuck_while_nobody_is_there():
    one = life()
    lease(one, "a")
    one.fail("t#a", m.AttemptFailed("t#a", "unsupported", "no such operator"), 0.0)
    assert one.stuck(None) == []
    assert one.state == "open"


def test_data_that_the_program_is_not_for_are_the_laboratorys_at_once():
    one = life()
    lease(one, "a")
    effects = one.fail("t#a", m.AttemptFailed("t#a", "data", "the matrix is singular"), 0.0)
    failed = next(x for x in effects if isinstance(x, fx.Failed))
    assert (failed.kind, failed.reason) == ("error", "the matrix is singular")
    assert [x.kind for x in effects if isinstance(x, fx.Charge)] == ["failed"]
    assert one.state == "failed"


def test_mismatch_names_the_first_difference():
    assert mismatch((blob("x"),), (SPEC,)) == ""
    assert "1 outputs where 2" in mismatch((blob("x"),), (SPEC, SPEC))
    small = m.ArraySpec((4,), "float32")
    good = m.BlobRef(digest(bytes(16)), small, 16, bytes(16))
    assert mismatch((good,), (small,)) == ""
    assert "bytes that are not" in mismatch((m.BlobRef(good.digest, small, 16, b"x" * 16),), (small,))
    assert "bytes that are not" in mismatch((m.BlobRef(good.digest, small, 16, b""),), (small,))
