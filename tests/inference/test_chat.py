"""`shmap_tp.chat`: templates as transformers renders them, history, a full context, and what is refused."""

import json

import pytest

from shmap_tp import chat
from shmap_tp.data import chat_template
from shmap_tp.data.chat_template import ChatTemplate
from shmap_tp.data.text_directory import TextDirectory
from shmap_tp.data.tokenizer import Bytes
from shmap_tp.errors import UserError
from shmap_tp.inference.generator import Options
from shmap_tp.inference.text import LEAST_ROOM, Chat

pytest.importorskip("jinja2")
TEMPLATE = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}{{ '[a]' if add_generation_prompt }}"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'A "quoted" <é>\n line'},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And now?"},
]
TEMPLATES = {
    "loop": "{%- for m in messages %}\n  {%- if loop.last %}{% continue %}{% endif %}\n{{ m.content | trim }}"
    "\n{%- endfor %}",
    "json": "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n  {{ m.content | tojson }}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}!{% endif %}",
    "tools": "{% if tools is not none %}tools{% endif %}{{ messages | tojson(indent=2) }}",
    "marked": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}{% endfor %}",
}


@pytest.mark.parametrize("continued", [False, True], ids=["answer", "continued"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_rendered_as_by_transformers(name, continued, tmp_path):
    """`continued`: the last message is an answer that has begun."""
    pytest.importorskip("transformers", reason="pip install -e '.[test-pretrained]'")
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    messages = [*MESSAGES, {"role": "assistant", "content": " It is "}][: None if continued else -1]
    if continued and name != "marked":
        pytest.skip("leaves answers out, or is refused by transformers")
    asked = {"add_generation_prompt": not continued, "continue_final_message": continued}
    (expected,), _ = render_jinja_template([messages], chat_template=TEMPLATES[name], **asked, **tokens)
    templates = {"chat_template": [{"name": "default", "template": TEMPLATES[name]}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens | {"eos_token": {"content": "</s>"}} | templates))
    assert TextDirectory.read(tmp_path).template().render(messages, continued=continued) == expected


def test_a_template_that_is_damaged_missing_or_refuses_is_named(tmp_path):
    with pytest.raises(UserError, match="has no chat template"):
        TextDirectory.read(tmp_path).template()
    for nonsense in (3, [3, {"name": []}, {"name": "default", "template": 5}], {"default": "x"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": nonsense}))
        with pytest.raises(UserError, match="has no chat template"):
            TextDirectory.read(tmp_path).template()
    with pytest.raises(UserError, match=r"none\.jinja cannot be read: No such file"):
        TextDirectory.read(tmp_path).template(str(tmp_path / "none.jinja"))
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match=r"chat_template\.jinja is not a chat template: "):
        TextDirectory.read(tmp_path).template()
    with pytest.raises(UserError, match="refuses the messages: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", "t", {}).render(MESSAGES)


ENDLESS = [
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "refuses .* more than 0.3 s"),
    ("{% for i in range(9) %}{{ 'x' * 20 }}{% endfor %}", "its text has more than 100 characters"),
]


@pytest.mark.parametrize(("text", "reason"), ENDLESS)
def test_a_template_without_end_is_ended(monkeypatch, text, reason):
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    monkeypatch.setattr(chat_template, "CHARACTERS", 100)
    with pytest.raises(UserError, match=reason):
        ChatTemplate(text, "t", {}).render(MESSAGES)


def test_a_template_that_was_ended_renders_the_next_messages(monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    text = "{% if messages[0].content == 'x' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    template = ChatTemplate(text + "{% endfor %}{% endif %}{{ messages[0].content }}", "t", {})
    with pytest.raises(UserError, match=r"takes more than 0\.3 s"):
        template.render([{"role": "user", "content": "x"}])
    assert template.render([{"role": "user", "content": "é\ud800\n"}]) == "é\ud800\n"
    with pytest.raises(UserError, match="t changes or leaves out the last message"):
        ChatTemplate("-", "t", {}).render(MESSAGES, continued=True)


def conversation(model, system: str | None = None) -> Chat:
    return Chat(model, Bytes(), ChatTemplate(TEMPLATE, "t", {}), Options(max_new_tokens=6), system)


def test_an_answer_is_the_greedy_continuation_of_the_rendered_history(model):
    here, shown, notes = conversation(model, "S"), [], []
    for question in ("one", "two"):
        shown.clear()
        history = [{"role": "system", "content": "S"}, *here.messages, {"role": "user", "content": question}]
        here.answer(question, shown.append, notes.append)
        prompt = list(ChatTemplate(TEMPLATE, "t", {}).render(history).encode())
        expected = Bytes().decode(model.generate([prompt], max_new_tokens=6, stop_tokens=(0,))[0])
        assert "".join(shown) == here.messages[-1]["content"] == expected
    assert [message["role"] for message in here.messages] == ["user", "assistant"] * 2 and not notes
    here.reset()
    assert here.messages == []


def test_a_full_context_forgets_the_oldest_messages_and_a_message_that_is_too_long_alone_is_refused(model):
    here, notes = conversation(model, "S"), []
    here.answer("a" * 20, lambda _: None, notes.append)
    here.answer("b" * 20, lambda _: None, notes.append)
    assert notes == ["the oldest 2 messages are forgotten: model.context=64 tokens are full"]
    assert here.messages[0]["content"] == "b" * 20 and len(here.messages) == 2
    before = list(here.messages)
    with pytest.raises(UserError, match=f"no room for {LEAST_ROOM} in model.context=64"):
        here.answer("c" * 60, lambda _: None, notes.append)
    assert here.messages == before


def test_ctrl_c_ends_an_answer_and_keeps_what_was_shown(model):
    here, shown = conversation(model), []

    def interrupted(piece: str) -> None:
        shown.append(piece)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        here.answer("one", interrupted, print)
    assert here.messages[-1] == {"role": "assistant", "content": shown[0]}


def test_the_chat_reads_commands_and_goes_on_after_errors_and_interrupts(model, monkeypatch, capsys):
    said = iter(["one", "", KeyboardInterrupt, "x" * 80, "/reset", "two", EOFError])

    def typed(_: str) -> str:
        if isinstance(text := next(said), str):
            return text
        raise text

    monkeypatch.setattr("builtins.input", typed)
    here = conversation(model)
    chat._chat(here)
    printed = capsys.readouterr().out
    assert "(/exit leaves)" in printed and "(forgotten)" in printed and "error: this message makes a prompt" in printed
    assert here.messages[0]["content"] == "two"


def test_a_checkpoint_without_a_template_is_refused(tmp_path, capsys):
    assert chat.main(["--checkpoint", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") <= 2
