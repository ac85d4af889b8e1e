"""Certificates: what they count, and how they read."""

import json

from goblin_dask.messages import Verdict
from goblin_dask.verify.certificate import LISTED, Certificate


def verdict(method="algebraic", ratio=0.5, miss=1e-6, volunteers=("x",), **what):
    return Verdict(method, ratio, miss, volunteers, **what)


def test_parts_are_grouped_by_method():
    certificate = Certificate()
    certificate.add(verdict(), "0.0")
    certificate.add(
        verdict(
            ratio=0.9,
            volunteers=("y",),
            rejected=2,
            check_seconds=0.5,
            compute_seconds=3.0,
            bytes_in=7,
            bytes_out=5,
            flops=10.0,
            spent=35.0,
        ),
        "0.1",
    )
    certificate.add(verdict("replicate", 0.1, 1e-3, ("x", "z")), "1.0")
    certificate.add_laboratory(2)
    shown = json.loads(json.dumps(certificate.to_dict()))
    assert (shown["parts"], shown["volunteers"], shown["worst_ratio"], shown["complete"]) == (5, 3, 0.9, True)
    algebraic = shown["methods"]["algebraic"]
    assert algebraic == {
        "parts": 2,
        "volunteers": 2,
        "worst_ratio": 0.9,
        "miss_probability": 1e-6,
        "miss_probability_any": 2e-6,
        "rejected": 2,
        "check_seconds": 0.5,
        "compute_seconds": 3.0,
        "bytes_in": 7,
        "bytes_out": 5,
        "flops": 10.0,
        "flops_spent": 35.0,
        "names": ["0.0", "0.1"],
    }
    assert shown["methods"]["laboratory"]["parts"] == 2
    assert "x" not in json.dumps(shown["methods"]["replicate"].get("names", [])).replace("ex", "")


def test_unchecked_parts_make_it_incomplete():
    certificate = Certificate()
    certificate.add(verdict("unchecked", 0.0, 0.9))
    assert not certificate.complete
    assert not certificate.to_dict()["complete"]


def test_merge_counts_volunteers_once():
    one, other = Certificate(), Certificate()
    one.add(verdict(volunteers=("x", "y")))
    other.add(verdict(volunteers=("y", "z"), miss=0.5))
    other.add(verdict("recompute"))
    one.merge(other)
    assert (one.parts, one.volunteers) == (3, 3)
    assert one.to_dict()["methods"]["algebraic"]["miss_probability"] == 0.5
    assert other.parts == 2


def test_many_parts_are_counted_not_named():
    certificate = Certificate()
    for number in range(LISTED + 1):
        certificate.add(verdict(miss=0.1), str(number))
    method = certificate.to_dict()["methods"]["algebraic"]
    assert "names" not in method
    assert method["miss_probability_any"] == 1.0
    assert certificate.summary().endswith("probability of an unnoticed error at most 0.1 in each part")


def test_summary():
    certificate = Certificate()
    assert certificate.summary() == "nothing was computed"
    certificate.add_laboratory()
    assert certificate.summary() == "1 part: 1 laboratory"
    certificate.add(verdict())
    certificate.add(verdict())
    assert certificate.summary() == (
        "3 parts: 2 algebraic, 1 laboratory; 1 volunteer; worst residual 0.5 of its tolerance; "
        "probability of an unnoticed error at most 2e-06"
    )
