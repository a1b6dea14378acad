from __future__ import annotations

from workers.render import Call, first_difference, split_samples


def call(prompt: str, sampled: str) -> Call:
    return Call(prompt_ids=tuple(map(ord, prompt)), sampled_ids=tuple(map(ord, sampled)))


def texts(calls: list[Call]) -> list[list[str]]:
    """Each sample's segments; sampled ones in capitals, as they are in these tests."""
    return [["".join(map(chr, segment.ids)) for segment in sample] for sample in split_samples(calls)]


def test_prompts_that_go_on_from_all_ids_before_make_one_sample() -> None:
    assert texts([call("q", "A"), call("qA-r>", "BC"), call("qA-r>BC-s>", "D")]) == [
        ["q", "A", "-r>", "BC", "-s>", "D"]
    ]


def test_a_rewritten_history_begins_a_sample_with_its_whole_prompt() -> None:
    assert texts([call("q", "TA"), call("qA-r>", "B"), call("qA-r>B-s>", "C")]) == [
        ["q", "TA"],
        ["qA-r>", "B", "-s>", "C"],
    ]


def test_a_shorter_prompt_is_a_break() -> None:
    assert texts([call("qq", "A"), call("q", "B")]) == [["qq", "A"], ["q", "B"]]


def test_each_sampled_id_is_in_one_sample_and_only_those_are_marked() -> None:
    calls = [call("q", "A"), call("x", "B"), call("xB-", "C"), call("y", "D")]

    segments = [segment for sample in split_samples(calls) for segment in sample]

    assert [segment.ids for segment in segments if segment.sampled] == [made.sampled_ids for made in calls]
    assert "".join(chr(token) for segment in segments if not segment.sampled for token in segment.ids) == "qx-y"


def test_no_calls_make_no_sample() -> None:
    assert split_samples([]) == []


def test_the_first_difference_is_where_the_history_ends_to_be_shown() -> None:
    assert first_difference((1, 2), (1, 2, 3)) is None
    assert first_difference((1, 2), (1, 3)) == 1
    assert first_difference((1, 2), (1,)) == 1
    assert first_difference((), ()) is None
