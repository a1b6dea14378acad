from __future__ import annotations

from workers.node_watch import NodeWatch


def test_a_node_is_lost_when_it_was_silent_at_every_look_for_long_enough() -> None:
    watch = NodeWatch(120.0)
    assert watch.lost({"a": 3}, 1000.0) == {}
    assert watch.lost({"a": 4, "b": 1}, 1119.0) == {}
    assert watch.lost({"a": 5, "b": 1}, 1120.0) == {"a": 5}
    assert watch.lost({"a": 2, "b": 1}, 1239.0) == {"a": 2, "b": 1}


def test_a_node_that_was_heard_of_in_between_begins_anew() -> None:
    watch = NodeWatch(120.0)
    assert watch.lost({"a": 1}, 0.0) == {}
    assert watch.lost({}, 60.0) == {}
    assert watch.lost({"a": 1}, 121.0) == {}
    assert watch.lost({"a": 1}, 241.0) == {"a": 1}
