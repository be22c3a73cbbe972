"""Chats as token ids: templates and their bounds, families, and words that stay words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluid_compat.errors import ChatUnsupported, InvalidField, MalformedRequest
from superfluid_workerd.codec.chat import ChatCodec
from superfluid_workerd.codec.families import FAMILIES, Family, fallback
from superfluid_workerd.codec.templates import LONGEST_SOURCE, Template
from superfluid_workerd.link.frames import Messages, Text, Tokens
from support.toy_tokenizer import ToyTokenizer

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(content: Any, **more: Any) -> Messages:
    return Messages(messages=[{"role": "user", "content": content}], **more)


def codec(template: str | None = CHATML, architecture: str = "", **more: Any) -> ChatCodec:
    return ChatCodec(ToyTokenizer(SPECIALS, **more), template, architecture)


def test_the_models_own_template_is_rendered() -> None:
    chat = Messages(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
            {"role": "assistant", "content": None},
        ]
    )
    assert codec().origin == "model"
    assert codec().render(chat) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_bos_is_there_exactly_once() -> None:
    start = [256, 258]
    assert codec().tokenize(user("x"))[:2] == start
    assert codec("{{ bos_token }}" + CHATML).tokenize(user("x"))[:2] == start
    assert codec(opens=False).tokenize(user("x"))[:1] == start[1:]


@given(st.lists(st.sampled_from([*SPECIALS, "<|im_", "end|>", "<", "x ", "\n", "é"]), max_size=12))
def test_a_clients_special_tokens_stay_text(parts: list[str]) -> None:
    """The template's own special tokens, no others, and every word of the client's."""
    said = "".join(parts)
    tokens = codec().tokenize(user(said))
    assert [token for token in tokens if token > 255] == [256, 258, 259, 258]
    text = ToyTokenizer(SPECIALS).decode(tokens, special=True).decode()
    assert text == f"<s><|im_start|>user\n{said.strip()}<|im_end|>\n<|im_start|>assistant\n"
    assert codec().render(user(said)) == text.removeprefix("<s>")


def test_words_without_special_tokens_have_the_ids_of_the_rendered_text() -> None:
    chat = user("plain \U000f0000 <b>words</b>")
    tokenizer = ToyTokenizer(SPECIALS)
    whole = tokenizer.encode(codec().render(chat), add_special=True, special=True)
    assert codec().tokenize(chat) == whole


def test_special_tokens_in_tools_and_arguments_stay_text_too() -> None:
    template = "{{ tools | tojson }}{{ mood }}<|im_end|>"
    tools = [{"name": "<|im_end|>", "<s>": 1}]
    chat = user("x", tools=tools, template_arguments={"mood": "</s>"})
    tokens = codec(template).tokenize(chat)
    assert [token for token in tokens if token > 255] == [256, 259]
    assert codec(template).render(chat) == '[{"name": "<|im_end|>", "<s>": 1}]</s><|im_end|>'


def test_text_and_tokens() -> None:
    assert codec().tokenize(Text(text="<s>a")) == [256, *b"<s>a"]
    assert codec().tokenize(Text(text="<s>a", add_special=False), special=True) == [256, 97]
    assert codec().tokenize(Tokens(tokens=[0, 261])) == [0, 261]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    ],
)
def test_a_misshapen_message_is_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        codec().render(Messages(messages=[message]))
    assert caught.value.param == param


def test_tools_and_reserved_arguments_are_refused_by_name() -> None:
    with pytest.raises(InvalidField) as caught:
        codec().render(user("x", tools=[{"type": "function"}]))
    assert caught.value.param == "tools"
    with pytest.raises(InvalidField) as caught:
        codec().render(user("x", template_arguments={"bos_token": "y"}))
    assert caught.value.param == "template_arguments.bos_token"
    assert codec().render(user("x", template_arguments={"add_generation_prompt": False})) == (
        "<|im_start|>user\nx<|im_end|>\n"
    )


def test_messages_nested_too_deeply_are_the_clients_fault() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    chat = Messages(messages=[{"role": "user", "content": "x", "more": deep}])
    with pytest.raises(MalformedRequest):
        codec().render(chat)


# What templates may expect.


def rendered(source: str, **variables: Any) -> str:
    return Template(source).render(variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% generation %}a{{ 1 }}{% endgeneration %}b", "a1b"),
        ("{{ {'b': '<é>', 'a': [1]} | tojson }}", '{"b": "<é>", "a": [1]}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% set n = namespace(v=1) %}{% set n.v = n.v + 1 %}{{ n.v }}", "2"),
        ("{% for m in messages %}{{ loop.index }}{{ loop.last }}{% endfor %}", "1False2True"),
        ("{% for m in nothing %}x{% else %}none{% endfor %}", "none"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) }}", "[1]"),
        ("{{ messages[0].content.split(' ')[-1] | upper }}{{ 'a' * 3 }}{{ 2 ** 3 }}", "THEREaaa8"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
    ],
)
def test_helpers_that_templates_expect(source: str, text: str) -> None:
    messages = [{"content": "hi there"}, {"content": "x"}]
    assert rendered(source, messages=messages) == text


def test_a_template_that_refuses_is_quoted() -> None:
    with pytest.raises(MalformedRequest, match="roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ missing.thing }}",
        "{% include 'other' %}",
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) %}{% for b in text %}{% endfor %}{% endfor %}",
        "{% for a in range(20000) %}{% set x = range(90000) | list %}{% endfor %}",
        "{{ range(10 ** 12) | list }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 12 * text }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% set t = 'a' * 1000000 %}{% for a in range(100) %}{{ t }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_hostile_template_fails_within_bounds(source: str) -> None:
    with pytest.raises(ChatUnsupported, match="the chat template"):
        rendered(source, messages=[1], text="x" * 1000)


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ x", "{{ x | nosuch }}", "(" * 10, "x" * (LONGEST_SOURCE + 1)]
)
def test_a_source_that_is_no_template_refuses_chats_only(source: str) -> None:
    broken = codec(source)
    assert broken.tokenize(Text(text="a")) == [256, 97]
    if source.startswith("("):
        assert broken.render(user("x")) == source
        return
    with pytest.raises(ChatUnsupported):
        broken.render(user("x"))


# Fallbacks.


def test_the_default_models_family_is_used_and_reported() -> None:
    base = codec(None, "gemma3")
    assert base.origin == "fallback:gemma"
    assert base.stops == {257, 261}
    chat = Messages(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": " Hi "},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Go"},
        ]
    )
    assert base.render(chat) == (
        "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
        "<start_of_turn>model\nYes?<end_of_turn>\n"
        "<start_of_turn>user\nGo<end_of_turn>\n<start_of_turn>model\n"
    )


def test_a_vocabulary_without_the_markers_has_no_fallback() -> None:
    plain = ChatCodec(ToyTokenizer(), None, "gemma3")
    assert plain.origin == "none"
    assert plain.stops == {257}
    with pytest.raises(ChatUnsupported, match="no chat template"):
        plain.tokenize(user("x"))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_fallback_writes_its_markers_and_keeps_the_words(family: Family) -> None:
    specials = ("<s>", "</s>", *family.markers)
    for architecture in family.architectures:
        assert fallback(architecture, lambda word: word in specials) == family
        one = ChatCodec(ToyTokenizer(specials), None, architecture)
        assert one.origin == f"fallback:{family.name}"
        chat = Messages(
            messages=[
                {"role": "system", "content": "SYS"},
                {"role": "user", "content": "ONE"},
                {"role": "assistant", "content": "TWO"},
                {"role": "user", "content": "THREE"},
            ]
        )
        text = one.render(chat)
        places = [text.index(word) for word in ("SYS", "ONE", "TWO", "THREE")]
        assert places == sorted(places)
        assert all(marker in text for marker in family.markers)
        assert one.tokenize(chat).count(256) == 1
        with pytest.raises(MalformedRequest, match="tool messages"):
            one.render(Messages(messages=[{"role": "tool", "content": "x"}]))


def test_an_unknown_architecture_has_no_fallback() -> None:
    assert fallback("mamba", lambda _: True) is None
