"""Reports about many equal modules stay short, and no module is lost in them."""

from __future__ import annotations

from moeffn.listing import listed


def test_equal_entries_become_one_line() -> None:
    entries = [(f"layers.{i}.mlp", "MLP") for i in (0, 1, 2, 5, 10)]
    assert listed(entries) == ["layers.{0-2,5,10}.mlp (5): MLP"]
    assert listed(reversed(entries)) == listed(entries)


def test_unlike_entries_stay_apart_in_order() -> None:
    assert listed([("a.1", "x"), ("b.1", "x"), ("a.2", "y"), ("a.3", "x")]) == ["a.{1,3} (2): x", "b.1: x", "a.2: y"]
    assert listed([("(root)", "x")]) == ["(root): x"] and listed([]) == []
    two = [("b.0.l.1", "x"), ("b.1.l.2", "x")]  # two numbers differ: one line would name four modules
    assert listed(two) == ["b.0.l.1: x", "b.1.l.2: x"]
    assert listed([("a.1", "x"), ("a.1", "x")]) == ["a.1: x", "a.1: x"]
