"""Grants: signed, expiring, never believed otherwise."""

import base64

import pytest

from goblin_dask.errors import Refused
from goblin_dask.messages import encode
from goblin_dask.store.grants import Grant, sign, verify

KEY, OTHER = b"k" * 32, b"o" * 32
GRANT = Grant("t" * 64, "t#1", "lease", 1000.0)


def test_a_grant_comes_back():
    assert verify(KEY, sign(KEY, GRANT), now=999.0) == GRANT


def test_a_grant_of_another_laboratory_is_refused():
    with pytest.raises(Refused, match="not signed for this laboratory"):
        verify(KEY, sign(OTHER, GRANT), now=0)


def test_an_expired_grant_is_refused():
    with pytest.raises(Refused, match="expired 5 s ago"):
        verify(KEY, sign(KEY, GRANT), now=1005.0)


@pytest.mark.parametrize("expires", [float("nan"), float("-inf")])
def test_a_grant_without_a_time_is_refused(expires):
    with pytest.raises(Refused):
        verify(KEY, sign(KEY, Grant("t", "a", "lease", expires)), now=0)


def test_every_changed_character_is_noticed():
    text = sign(KEY, GRANT)
    for at in range(len(text)):
        changed = text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]
        with pytest.raises(Refused):
            verify(KEY, changed, now=0)


@pytest.mark.parametrize("text", ["", "é", "x", "=" * 40, "A" * 3000, base64.b64encode(b"\0" * 60).decode()])
def test_nonsense_is_refused(text):
    with pytest.raises(Refused):
        verify(KEY, text, now=0)


def test_an_unsigned_payload_is_refused():
    forged = base64.urlsafe_b64encode(b"\0" * 32 + encode(GRANT)).decode()
    with pytest.raises(Refused, match="not signed"):
        verify(KEY, forged, now=0)


def test_a_short_key_signs_nothing():
    with pytest.raises(ValueError, match="32 bytes"):
        sign(b"short", GRANT)
