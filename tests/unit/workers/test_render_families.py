"""Renderers of the published families against the library that renders whole conversations.

Over 400 lines: what one family does differently stands beside what the others do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.config import TINY_MODELS, RenderConfig, RunConfig
from common.episode import Message, ToolCall, ToolSpec
from common.errors import SetupError
from tests.unit.workers.model_families import HYBRID, INSTRUCT, LLAMA, PLAIN, PUBLISHED, QWEN, THINKING, Published
from workers.render import Call, Renderer, split_samples
from workers.render.families import CHATML, detect_family
from workers.render.of_run import renderer_of

TOOL = ToolSpec(
    name="look", description="Look.", parameters={"type": "object", "properties": {"at": {"type": "string"}}}
)
QUESTION = (Message(role="user", content="What is there? \U0001f333"),)
THOUGHT = "<think>\nleft first\n</think>\n\n"
DROPPING = QWEN.template.replace("message.content", "message.content.split('</think>')[-1].lstrip()")
"""Shows no turn's thinking."""
LAST_TURN = """\
{%- set last = namespace(index=-1) %}
{%- for message in messages %}{%- if message.role == 'assistant' %}{%- set last.index = loop.index0 %}{%- endif %}
{%- endfor %}
"""


@pytest.fixture(params=PUBLISHED, ids=lambda published: published.name)
def published(request: pytest.FixtureRequest) -> Published:
    assert isinstance(request.param, Published)
    return request.param


def load(
    published: Published, folder: Path, *, enable_thinking: bool | None = None, keep_thinking: bool = True
) -> Renderer:
    template_kwargs = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    return Renderer.from_folder(published.write(folder), template_kwargs=template_kwargs, keep_thinking=keep_thinking)


def calls(*places: str) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(name="look", arguments={"at": place}) for place in places)


def conversation(published: Published) -> list[Message]:
    """Three turns with tools, as the family writes them: thinking, parallel results, empty content, unicode."""
    thought = THOUGHT if published in (HYBRID, THINKING) else ""
    places = ("left",) if published is LLAMA else ("left", "right")
    return [
        Message(role="system", content="Be brief."),
        *QUESTION,
        Message(
            role="assistant", content=f"{thought}Both." if published is not LLAMA else "", tool_calls=calls(*places)
        ),
        Message(role="tool", content="e\u0301 \u6f22\u5b57 tree"),
        Message(role="tool", content="a house\n"),
        Message(role="assistant", content=thought, tool_calls=calls("up")),
        Message(role="tool", content=""),
        Message(role="assistant", content=f"{thought}A tree and a house."),
    ]


def library_ids(
    folder: Path, messages: list[Message], *, generation_prompt: bool, replaced: Mapping[str, str | None] | None = None
) -> list[int]:
    """What the library that models are published with makes of it; `replaced` contents are shown as another."""
    from transformers import PreTrainedTokenizerFast

    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token=config["bos_token"], eos_token=config["eos_token"]
    )
    conversation: list[dict[str, Any]] = [
        {
            "role": message.role,
            "content": (replaced or {}).get(message.content, message.content),
            **(
                {"tool_calls": [{"type": "function", "function": c.model_dump()} for c in message.tool_calls]}
                if message.tool_calls
                else {}
            ),
        }
        for message in messages
    ]
    ids: Any = tokenizer.apply_chat_template(
        conversation,
        tools=[{"type": "function", "function": TOOL.model_dump()}],
        chat_template=(folder / "chat_template.jinja").read_text(),
        add_generation_prompt=generation_prompt,
        return_dict=False,
        date_string="26 Jul 2024",
    )
    assert isinstance(ids, list)
    return ids


def test_the_family_is_told_by_the_vocabulary_and_closes_turns_with_its_own_token(
    published: Published, tmp_path: Path
) -> None:
    renderer = load(published, tmp_path)

    with pytest.raises(SetupError, match=rf"{tmp_path} \({published.family}\): "):
        Renderer.from_folder(published.write(tmp_path, template="{{ messages + 1 }}"))
    close = "<|eot_id|>" if published is LLAMA else "<|im_end|>"
    assert renderer.decode([renderer.close_id]) == close
    assert renderer.stop_ids[0] == renderer.close_id


def test_stop_ids_hold_what_ends_a_document_and_a_call_too(tmp_path: Path) -> None:
    llama = load(LLAMA, tmp_path)

    assert [llama.decode([token]) for token in llama.stop_ids] == ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"]


def test_the_eos_token_at_which_engines_stop_unasked_is_no_part_of_the_text(tmp_path: Path) -> None:
    renderer = load(PLAIN, tmp_path)
    eos = PLAIN.tokenizer().token_to_id(PLAIN.eos)
    assert eos is not None
    said = [*PLAIN.tokenizer().encode("A tree.").ids, eos]

    assert renderer.stop_ids == (renderer.close_id, eos)
    assert renderer.parse(said).content == "A tree."
    assert renderer.suffix([Message(role="tool", content="x")], after=said)[0] == renderer.close_id


def test_ids_turn_by_turn_equal_the_library_whole(published: Published, tmp_path: Path) -> None:
    renderer = load(published, tmp_path)
    messages = conversation(published)

    segments = renderer.segments(messages, [TOOL])

    assert [segment.sampled for segment in segments] == [False, True] * 3
    extended = [token for segment in segments for token in segment.ids]
    # What the template writes behind the last close token belongs to a suffix that nobody asked for.
    whole = library_ids(tmp_path, messages, generation_prompt=False)
    assert extended == whole[: len(extended)]
    assert renderer.decode(whole[len(extended) :]).strip() == ""


def test_prompts_made_of_sampled_ids_are_one_sample_without_a_break(published: Published, tmp_path: Path) -> None:
    renderer = load(published, tmp_path)
    messages = conversation(published)
    turns = [segment.ids for segment in renderer.segments(messages, [TOOL]) if segment.sampled]

    prompt = renderer.first_prompt(messages[:2], [TOOL])
    made = []
    for sampled, results in zip(turns, (messages[3:5], messages[6:7], []), strict=True):
        made.append(Call(prompt_ids=tuple(prompt), sampled_ids=sampled))
        prompt = [*prompt, *sampled, *(renderer.suffix(results, after=sampled) if results else [])]

    assert len(split_samples(made)) == 1
    assert made[2].prompt_ids == tuple(library_ids(tmp_path, messages[:7], generation_prompt=True))


def test_a_turn_is_read_as_the_family_writes_it(published: Published, tmp_path: Path) -> None:
    renderer = load(published, tmp_path)
    messages = conversation(published)
    turns = [segment.ids for segment in renderer.segments(messages, [TOOL]) if segment.sampled]

    parsed = [renderer.parse(ids) for ids in turns]

    assert [turn.error for turn in parsed] == [None] * 3
    if published is not PLAIN:  # its template shows no calls
        assert [turn.tool_calls for turn in parsed] == [messages[2].tool_calls, calls("up"), ()]
    assert parsed[2].content.endswith("A tree and a house.")


def test_a_separator_after_the_close_token_belongs_to_the_suffix(published: Published, tmp_path: Path) -> None:
    renderer = load(published, tmp_path)

    suffix = renderer.decode(renderer.suffix([Message(role="tool", content="a tree")]))

    assert suffix.startswith("<|start_header_id|>ipython" if published is LLAMA else "\n<|im_start|>")


def test_parallel_results_are_shown_as_the_family_groups_them(tmp_path: Path) -> None:
    results = [Message(role="tool", content="a tree"), Message(role="tool", content="a house")]

    qwen = load(QWEN, tmp_path)
    assert qwen.decode(qwen.suffix(results)) == (
        "\n<|im_start|>user\n<tool_response>\na tree\n</tool_response>\n<tool_response>\na house\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    llama = load(LLAMA, tmp_path)
    assert llama.decode(llama.suffix(results)) == (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"a tree"<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"a house"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_a_turn_that_another_stop_token_or_a_limit_ended_is_closed_by_the_suffix(
    published: Published, tmp_path: Path
) -> None:
    renderer = load(published, tmp_path)
    result = [Message(role="tool", content="a tree")]
    cut = renderer.first_prompt(QUESTION, [])[-1:]
    document_end = [renderer.stop_ids[-1]]

    plain = renderer.suffix(result, after=[renderer.close_id])

    assert renderer.suffix(result) == plain
    assert renderer.suffix(result, after=cut) == [renderer.close_id, *plain]
    if document_end != [renderer.close_id]:
        assert renderer.suffix(result, after=document_end) == [renderer.close_id, *plain]
        assert renderer.parse([*cut, *document_end]) == renderer.parse(cut)


def test_a_call_that_waits_for_its_result_needs_no_second_end(tmp_path: Path) -> None:
    llama = load(LLAMA, tmp_path)
    end = llama.stop_ids[1]

    assert llama.decode([end]) == "<|eom_id|>"
    result = [Message(role="tool", content="a tree")]
    assert llama.suffix(result, after=[end]) == llama.suffix(result)


def test_thinking_that_the_template_drops_stays_in_prompts_made_of_ids(tmp_path: Path) -> None:
    renderer = load(HYBRID, tmp_path)
    more = [Message(role="user", content="And behind?")]
    said = Message(role="assistant", content=f"{THOUGHT}A tree.")
    first = renderer.segments([*QUESTION, said], [])

    extended = [*first[0].ids, *first[1].ids, *renderer.suffix(more, after=first[1].ids)]
    shown = renderer.first_prompt([*QUESTION, said, *more], [])

    assert renderer.decode(extended).count("left first") == 1
    assert renderer.decode(shown).count("left first") == 0
    assert renderer.decode(extended).replace(THOUGHT, "") == renderer.decode(shown)


def test_a_harness_that_drops_thinking_begins_a_new_sample(tmp_path: Path) -> None:
    renderer = load(HYBRID, tmp_path)
    more = [Message(role="user", content="And behind?")]
    said = Message(role="assistant", content=f"{THOUGHT}A tree.")
    prompt, sampled = renderer.segments([*QUESTION, said], [])
    shown = tuple(renderer.first_prompt([*QUESTION, said, *more], []))

    samples = split_samples(
        [
            Call(prompt_ids=prompt.ids, sampled_ids=sampled.ids),
            Call(prompt_ids=shown, sampled_ids=(7,)),
            Call(prompt_ids=(*shown, 7, 8), sampled_ids=(9,)),
        ]
    )

    assert [[segment.ids for segment in sample] for sample in samples] == [
        [prompt.ids, sampled.ids],
        [shown, (7,), (8,), (9,)],
    ]


def test_no_content_and_empty_content_are_no_break(tmp_path: Path) -> None:
    renderer = load(QWEN, tmp_path)
    messages = [*QUESTION, Message(role="assistant", content="", tool_calls=calls("up"))]
    prompt, sampled = renderer.segments(messages, [TOOL])
    messages.append(Message(role="tool", content="a tree"))

    for content in ("", None):
        shown = library_ids(tmp_path, messages, generation_prompt=True, replaced={"": content})
        made = [
            Call(prompt_ids=prompt.ids, sampled_ids=sampled.ids),
            Call(prompt_ids=tuple(shown), sampled_ids=(renderer.close_id,)),
        ]
        assert len(split_samples(made)) == 1


@pytest.mark.parametrize("keep_thinking", [True, False])
def test_a_template_that_drops_thinking_rewrites_the_history_unless_it_is_kept(
    tmp_path: Path, keep_thinking: bool
) -> None:
    folder = QWEN.write(tmp_path, template=DROPPING)
    renderer = Renderer.from_folder(folder, keep_thinking=keep_thinking)
    result = Message(role="tool", content="a tree")

    for thought, is_dropped in (("", False), (THOUGHT, True)):
        said = Message(role="assistant", content=f"{thought}Up.", tool_calls=calls("up"))
        shown = renderer.rewritten([*QUESTION, said, result], [TOOL])
        if keep_thinking or not is_dropped:
            assert shown is None
        else:
            assert shown == renderer.first_prompt([*QUESTION, said, result], [TOOL])
            assert "left first" not in renderer.decode(shown)


def test_thinking_that_is_shown_until_a_user_answers_rewrites_the_history_there(tmp_path: Path) -> None:
    renderer = load(HYBRID, tmp_path, keep_thinking=False)
    said = Message(role="assistant", content=f"{THOUGHT}A tree.")

    assert renderer.rewritten([*QUESTION, said, Message(role="tool", content="a tree")], [TOOL]) is None
    assert renderer.rewritten([*QUESTION, said, Message(role="user", content="And behind?")], [TOOL]) is not None


def test_thinking_of_the_turn_before_the_last_that_is_dropped_rewrites_the_history(tmp_path: Path) -> None:
    said_last = "(message.content if loop.index0 == last.index else message.content.split('</think>')[-1].lstrip())"
    template = LAST_TURN + QWEN.template.replace("message.content", said_last)
    renderer = Renderer.from_folder(QWEN.write(tmp_path, template=template), keep_thinking=False)
    result = Message(role="tool", content="a tree")
    said = Message(role="assistant", content=f"{THOUGHT}Up.", tool_calls=calls("up"))

    assert renderer.rewritten([*QUESTION, said, result], [TOOL]) is None
    assert renderer.rewritten([*QUESTION, said, result, said, result], [TOOL]) is not None


def test_ids_that_no_text_would_give_again_and_other_spellings_of_a_call_rewrite_nothing(tmp_path: Path) -> None:
    renderer = load(THINKING, tmp_path, keep_thinking=False)
    result = Message(role="tool", content="e\u0301 \u6f22\u5b57 \ufffd\n\n")
    for content in (THOUGHT.removeprefix("<think>\n"), "\u0301\ufffd</think>", "\n\nso</think>Up"):
        said = Message(role="assistant", content=content, tool_calls=calls("up"))
        assert renderer.rewritten([*QUESTION, said, result], [TOOL]) is None


def test_a_history_that_the_template_cannot_show_goes_on(tmp_path: Path) -> None:
    renderer = load(LLAMA, tmp_path, keep_thinking=False)
    said = Message(role="assistant", content="", tool_calls=calls("up", "left"))
    assert renderer.rewritten([*QUESTION, said, Message(role="tool", content="a tree")], [TOOL]) is None


def test_a_run_s_configuration_chooses_how_its_model_is_shown(tmp_path: Path) -> None:
    HYBRID.write(tmp_path)
    config = RunConfig(name="run", model=tmp_path, render=RenderConfig(template_kwargs={"enable_thinking": False}))

    renderer = renderer_of(config)

    assert renderer.decode(renderer.first_prompt(QUESTION, [])).endswith("<think>\n\n</think>\n\n")
    assert renderer_of(config.model_copy(update={"name": "other"})) is renderer


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> list[Renderer]:
    return [load(published, tmp_path_factory.mktemp(published.name)) for published in PUBLISHED]


@given(
    results=st.lists(st.text(max_size=40) | st.sampled_from(["\n", " \n\n", "<|im_end|>\n", "<tool_call>"]), min_size=1)
)
@settings(max_examples=40)
def test_whatever_tools_answer_the_suffix_is_what_the_whole_render_shows(
    renderers: list[Renderer], results: list[str]
) -> None:
    answers = [Message(role="tool", content=result) for result in results]
    asked = Message(role="assistant", content="", tool_calls=calls("up"))
    for renderer in renderers:
        segments = renderer.segments([*QUESTION, asked, *answers], [TOOL])
        assert segments[2].ids == tuple(renderer.suffix(answers, after=segments[1].ids))


def test_an_empty_thought_in_the_prompt_stays_in_every_turn(tmp_path: Path) -> None:
    renderer = load(HYBRID, tmp_path, enable_thinking=False)

    prompt = renderer.decode(renderer.first_prompt(QUESTION, [TOOL]))
    suffix = renderer.decode(renderer.suffix([Message(role="tool", content="a tree")]))

    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert suffix.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert suffix.startswith("\n<|im_start|>user\n<tool_response>\na tree")


def test_an_empty_thought_that_the_template_shows_in_the_last_turn_alone_can_be_left_to_it(tmp_path: Path) -> None:
    renderer = load(HYBRID, tmp_path, enable_thinking=False, keep_thinking=False)
    said = Message(role="assistant", content="Up.", tool_calls=calls("up"))

    shown = renderer.rewritten([*QUESTION, said, Message(role="tool", content="a tree")], [TOOL])

    assert shown is not None
    assert renderer.decode(shown).count("<think>") == 1


@pytest.mark.parametrize(
    ("published", "text", "error"),
    [
        (THINKING, 'so <tool_call>{"name": "look", "arguments": {}}</tool_call>', "<think> is not closed"),
        (HYBRID, "<think>\nso on", "<think> is not closed"),
        (THINKING, "so\n</think>\n\nA tree.", None),
        (HYBRID, "A tree.", None),
        (INSTRUCT, "A tree.", None),
    ],
)
def test_a_turn_may_not_end_inside_its_thinking(
    published: Published, text: str, error: str | None, tmp_path: Path
) -> None:
    parsed = load(published, tmp_path).parse(published.tokenizer().encode(text).ids)

    assert parsed.error == error
    assert parsed.tool_calls == ()


def test_sampled_ids_that_no_text_would_give_again_stay_in_the_prompt(tmp_path: Path) -> None:
    renderer = load(QWEN, tmp_path)
    tokenizer = QWEN.tokenizer()
    unmerged = [tokenizer.encode(character).ids[0] for character in "tree"]
    halves = [*tokenizer.encode("\u0301").ids, *tokenizer.encode("\u6f22").ids[:1]]
    assert tokenizer.encode(renderer.decode(unmerged)).ids != unmerged
    assert tokenizer.encode(renderer.decode(halves)).ids != halves

    sampled = (*unmerged, *halves, renderer.close_id)
    prompt = [*renderer.first_prompt(QUESTION, []), *sampled]
    prompt += renderer.suffix([Message(role="tool", content="x")], after=sampled)

    assert prompt[len(renderer.first_prompt(QUESTION, [])) :][: len(sampled)] == list(sampled)


def test_pad_equal_to_eos_leaves_the_end_of_a_turn_sampled(tmp_path: Path) -> None:
    renderer = load(QWEN, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["pad_token"] == "<|im_end|>"

    last = renderer.segments(conversation(QWEN), [TOOL])[-1]

    assert last.sampled
    assert last.ids[-1] == renderer.close_id


@pytest.mark.parametrize("name", ["tiny-calculator", "tiny-shell"])
def test_the_shipped_policies_are_chatml(name: str) -> None:
    told, generic = (Renderer.from_folder(TINY_MODELS / name, family=family) for family in (None, "generic"))

    assert detect_family(Tokenizer.from_file(str(TINY_MODELS / name / "tokenizer.json"))) is CHATML
    assert told.stop_ids == generic.stop_ids
