"""A dictionary of bounded length."""

from forebay_gateway.base.recent import Recent


def test_what_was_set_longest_ago_goes_first() -> None:
    found: Recent[str, int] = Recent(2)
    found["a"], found["b"] = 1, 2
    assert found["a"] == 1  # reading makes nothing newer
    found["c"] = 3
    assert dict(found) == {"b": 2, "c": 3}
    found["b"] = 4
    assert found.setdefault("d", 5) == 5
    assert dict(found) == {"b": 4, "d": 5}
    assert found.setdefault("b", 9) == 4
