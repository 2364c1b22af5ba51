"""Records as other people's programs write them: decoded to what a template expects, or refused by their place."""

import json
import re
from datetime import datetime
from decimal import Decimal

import numpy as np
import pytest

from shmap_tp.data.chat_template import ChatTemplate
from shmap_tp.data.conversations import ChatSource, samples_of
from shmap_tp.data.messages import conversation, pair
from shmap_tp.data.text_directory import TextDirectory
from shmap_tp.data.tokenizer import Bytes
from shmap_tp.errors import UserError

pytest.importorskip("jinja2")

WEATHER = {"type": "function", "function": {"name": "weather"}}
CALL = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
CALL_AS_TEXT = {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
ASKED, SAID = {"role": "user", "content": "rain?"}, {"role": "assistant", "content": "no"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
WITH_CALLS = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARTS = [{"type": "text", "text": "ra"}, {"type": "text", "text": "in?"}]
END = re.compile(re.escape("|"))


def text_of(row: dict, template: str = WITH_CALLS) -> str:
    (sample,) = samples_of(conversation(row, "here"), ChatTemplate(template, "t", {}), END)
    return sample.text


@pytest.mark.parametrize(
    ("given", "form"),
    [
        (  # logs of OpenAI's form
            {"messages": [ASKED, CALLING | {"tool_calls": [CALL_AS_TEXT]}]},
            {"messages": [ASKED, CALLING]},
        ),
        (  # tables, in which every field is a text
            {"messages": [ASKED, SAID], "tools": json.dumps([WEATHER])},
            {"messages": [ASKED, SAID], "tools": [WEATHER]},
        ),
        ({"messages": [ASKED, SAID], "tools": [json.dumps(WEATHER)]}, {"messages": [ASKED, SAID], "tools": [WEATHER]}),
        ({"messages": [ASKED, SAID], "tools": ""}, {"messages": [ASKED, SAID]}),
        ({"messages": [ASKED, SAID], "tools": "[]"}, {"messages": [ASKED, SAID]}),
        ({"messages": [ASKED | {"content": PARTS}, SAID]}, {"messages": [ASKED, SAID]}),
        (
            {"conversations": [{"from": "human", "value": PARTS}, {"from": "gpt", "value": "no"}]},
            {"messages": [ASKED, SAID]},
        ),
    ],
    ids=["arguments", "tools", "each tool", "no tools", "an empty list", "parts", "parts of ShareGPT's form"],
)
def test_a_form_of_logs_and_tables_is_the_same_conversation(given, form):
    assert conversation(given, "") == conversation(form, "")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"content": None}, r"here: message 1: its content is null; give a text"),
        ({"content": 3}, r"here: message 1: its content is 3; give a text"),
        ({"content": {"text": "no"}}, r'here: message 1: its content is .*"no".*; give a text'),
        ({"content": [{"type": "image_url"}]}, r"here: message 1: its content is .*image_url"),
        ({"tool_calls": [CALL | {"function": {"arguments": "rain"}}]}, r"here: message 1: the arguments .* rain; give"),
        ({"tool_calls": [{"function": {"arguments": 3}}]}, r"here: message 1: the arguments of a tool call is 3"),
        ({"tool_calls": 3}, r"here: message 1: tool_calls is 3; give a JSON list"),
    ],
)
def test_another_content_or_call_is_refused_with_its_place(changed, message):
    with pytest.raises(UserError, match=message):
        conversation({"messages": [ASKED, SAID | changed]}, "here")
    with pytest.raises(UserError, match=message.replace("here", "here, chosen")):
        pair({"prompt": [ASKED], "chosen": [SAID | changed], "rejected": [SAID]}, "here")


@pytest.mark.parametrize("tools", ["weather", 3, [3], '{"type": "function"}', "[" * 100_000], ids=lambda x: str(x)[:9])
def test_tools_that_are_no_list_of_objects_are_refused_with_their_place(tools):
    with pytest.raises(UserError, match=r"^here: (a tool|tools) is .*; give a JSON (list|object)"):
        conversation({"messages": [ASKED, SAID], "tools": tools}, "here")


@pytest.mark.parametrize("content", ["{{ m.content }}", "{{ m.content | trim }}", "{{ 'x' ~ m.content }}"])
def test_a_template_that_writes_the_content_null_as_a_word_is_refused(content):
    """Where templates know null, as DeepSeek's, it reaches them."""
    row = {"messages": [ASKED, CALLING, {"role": "tool", "content": "sun"}, SAID]}
    writes = WITH_CALLS.replace("{{ m.content or '' }}", content)
    with pytest.raises(UserError, match=r"^here: t writes the content null of a message as None; write \"\" there"):
        text_of(row, writes)
    asks = WITH_CALLS.replace("{{ m.content or '' }}", "{{ '' if m.content is none else m.content }}")
    assert text_of(row, asks) == text_of(row)
    assert "None" in text_of({"messages": [ASKED, SAID | {"content": "None"}]}, writes)


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{{ messages[0].content }}",
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}|{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}|{% endfor %}",
    ],
    ids=["empty", "the first message", "users' messages", "nothing is marked"],
)
def test_a_template_that_writes_no_answer_is_refused(template):
    with pytest.raises(UserError, match=r"^here: the chat template does not write the answer 1; give another"):
        text_of({"messages": [ASKED, SAID]}, template)


def test_a_directory_with_a_template_for_tools_uses_it_where_there_are_tools(tmp_path):
    """As transformers chooses; spaces and line breaks at their borders stay."""
    named = {"default": "\n{{ messages | length }} \n", "tool_use": "  {{ tools | tojson }}\n"}
    named = [{"name": name, "template": text} for name, text in named.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = TextDirectory.read(tmp_path).template()
    assert template.render_marked([ASKED, SAID])[0] == "\n2 "
    assert template.render_marked([ASKED, SAID], [WEATHER])[0] == f"  {json.dumps([WEATHER])}"


def test_values_of_tables_that_json_lacks_are_texts(tmp_path):
    """Columns beside the messages, and fields of them."""
    others = {"created_at": datetime(2026, 1, 2), "cost": Decimal("0.1"), "audio": b"\0"}
    rows = [("here", {"messages": [ASKED | others, SAID | {"content": f"{i}"}]} | others) for i in range(2)]
    template = ChatTemplate(WITH_CALLS.replace("{{ m.content", "{{ m.created_at }} {{ m.content"), "t", {})
    source = ChatSource("a", lambda: iter(rows), template, TextDirectory({}, ""), validation=0.5, row=128, cut=False)
    found = [bytes(np.where(ids < 0, ~ids, ids).astype("u1")).decode() for _, ids in source.tokenized(Bytes())]
    assert len(found) == 2 and all("2026-01-02 00:00:00" in text for text in found)


def test_dates_in_tools_are_texts_as_they_are_in_messages():
    tools = [{"name": "weather", "since": datetime(2026, 11, 28)}]
    text, _ = ChatTemplate("{{ tools | tojson }}", "t", {}).render_marked([ASKED], tools)
    assert json.loads(text) == [{"name": "weather", "since": "2026-11-28 00:00:00"}]
