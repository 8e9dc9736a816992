"""Conversations as token ids: against transformers' own call, the ways to name a template, and every bad message."""

import copy
import shutil

import pytest

from moe_jax.demo import demo_model_path
from moe_jax.errors import ConfigError, InputError, TokenizerError
from moe_jax.generation.chat import ROLES, encode_chat
from moe_jax.generation.text import load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ mood or '' }}{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Who lives in the forêt?"},
    {"role": "assistant", "content": "A wolf."},
    {"role": "user", "content": "Why?"},
]
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def plain():
    return load_tokenizer(demo_model_path())


@pytest.fixture(scope="module")
def chatty(plain):
    tokenizer = copy.deepcopy(plain)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def several(plain):
    tokenizer = copy.deepcopy(plain)
    tokenizer.chat_template = {"default": TEMPLATE, "rag": "rag: {{ messages[0].content }}"}
    return tokenizer


def text(tokenizer, *args, **options):
    return tokenizer.decode(encode_chat(tokenizer, *args, **options))


# ------------------------------------------------------------------------------------------------------------ templates


def test_ids_are_those_of_transformers(chatty):
    want = chatty.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False)
    assert encode_chat(chatty, TALK) == want
    assert encode_chat(chatty, tuple(TALK)) == want
    # What the template writes is the whole prompt: its special token is one id, and no other is added.
    assert want.count(chatty.bos_token_id) == 1 and want[0] == chatty.bos_token_id
    assert chatty.decode(want[1:]).startswith("[system]Be short.\n[user]Who lives in the forêt?\n[assistant]A wolf.\n")
    assert chatty.decode(want).endswith("[user]Why?\n[assistant]")


def test_a_tokenizer_that_adds_special_tokens_adds_none_to_a_chat(chatty):
    class Adding:
        """Puts id 1 before a text unless told not to."""

        chat_template = TEMPLATE
        apply_chat_template = chatty.apply_chat_template

        def __call__(self, text, *, add_special_tokens=True, **options):
            ids = chatty(text, **options)["input_ids"]
            return {"input_ids": [1, *ids] if add_special_tokens else ids}

    assert encode_chat(Adding(), TALK) == encode_chat(chatty, TALK)


@pytest.mark.parametrize("place", ("chat_template.jinja", "tokenizer_config.json"))
def test_a_template_is_found_where_releases_have_it(place, plain, chatty, tmp_path):
    if place == "chat_template.jinja":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo_model_path() / name, tmp_path)
        (tmp_path / place).write_text(TEMPLATE)
    else:
        chatty.save_pretrained(tmp_path, save_jinja_files=False)
        assert "add_generation_prompt" in (tmp_path / place).read_text()
    assert encode_chat(load_tokenizer(tmp_path), TALK) == encode_chat(chatty, TALK)


def test_another_template_and_its_variables(plain, chatty, several):
    assert encode_chat(plain, TALK, TEMPLATE) == encode_chat(chatty, TALK)
    assert text(chatty, TALK, chat_template_kwargs={"mood": "(sad)"}).endswith("[assistant](sad)")
    assert text(plain, TALK, "{% for t in tools %}{{ t.name }} {% endfor %}.", {"tools": [{"name": "f"}]}) == "f ."
    assert encode_chat(several, TALK) == encode_chat(chatty, TALK)
    assert text(several, TALK, "rag") == "rag: Be short."


def test_without_a_template(plain):
    with pytest.raises(TokenizerError, match=r"has no chat template.*pass chat_template=.*generate\(\)"):
        encode_chat(plain, TALK)


@pytest.mark.parametrize(
    ("template", "says"),
    (
        ("rga", r"'rga' is neither Jinja text nor the name of a template; the tokenizer's templates are default, rag$"),
        ("", "'' is neither Jinja text"),
        (7, "chat_template=7 is not allowed"),
    ),
)
def test_a_template_that_is_none(template, says, several):
    with pytest.raises(ConfigError, match=says):
        encode_chat(several, TALK, template)


def test_several_templates_without_a_default(several):
    tokenizer = copy.deepcopy(several)
    tokenizer.chat_template = {"rag": TEMPLATE, "tool_use": TEMPLATE}
    with pytest.raises(ConfigError, match=r"none of them is the default; the tokenizer's templates are rag, tool_use"):
        encode_chat(tokenizer, TALK)
    assert encode_chat(tokenizer, TALK, "rag") == encode_chat(several, TALK)


@pytest.mark.parametrize("variables", ({"tokenize": True}, {"messages": []}, {"add_generation_prompt": False}))
def test_what_is_not_the_callers_to_set(variables, chatty):
    with pytest.raises(ConfigError, match=f"chat_template_kwargs has '{next(iter(variables))}'"):
        encode_chat(chatty, TALK, chat_template_kwargs=variables)


@pytest.mark.parametrize("variables", ([("a", 1)], {1: 2}))
def test_variables_that_are_no_mapping_of_names(variables, chatty):
    with pytest.raises(ConfigError, match="must map names"):
        encode_chat(chatty, TALK, chat_template_kwargs=variables)


@pytest.mark.parametrize(
    ("template", "says"),
    (
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages[0].update({}) }}", "SecurityError"),
    ),
)
def test_a_template_that_fails(template, says, plain):
    with pytest.raises(InputError, match=rf"cannot be applied to these messages \({says}.*change the messages"):
        encode_chat(plain, TALK, template)


def test_a_template_that_writes_nothing(plain):
    with pytest.raises(InputError, match="makes an empty prompt"):
        encode_chat(plain, TALK, "{% if false %}{% endif %}")


# ------------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("role", ROLES)
def test_every_role_reaches_the_template(role, chatty):
    assert f"[{role}]hi\n" in text(chatty, [{"role": role, "content": "hi"}])


def test_further_entries_reach_the_template(plain):
    call = {"role": "assistant", "tool_calls": [{"name": "look"}]}
    template = "{% for m in messages %}{{ m.tool_calls[0].name if m.tool_calls else m.content }};{% endfor %}"
    assert text(plain, [USER, call, {"role": "tool", "content": "sun"}], template) == "hi;look;sun;"
    assert text(plain, [USER, call | {"content": None}], template) == "hi;look;"


@pytest.mark.parametrize(
    ("messages", "says"),
    (
        ([], "messages is empty"),
        ("hi", "messages is of type str: give a list"),
        (USER, "messages is of type dict: give a list"),
        (None, "messages is of type NoneType"),
        ([{"role": "user", "content": "a\udcff"}], r"the conversation holds '\\udcff' at character"),
        ([[USER]], r"messages\[0\] is a list: give one conversation"),
        ([USER, "hi"], r"messages\[1\] is of type str"),
        ([USER, {"content": "hi"}], r'messages\[1\] has no "role": give one of system, developer'),
        ([{"role": "bot", "content": "hi"}], r'messages\[0\]\["role"\] is \'bot\': it must be one of system'),
        ([{"role": ["user"], "content": "hi"}], r"messages\[0\]\[\"role\"\] is \['user'\]"),
        ([USER, {"role": "assistant"}], r'messages\[1\] \(assistant\) has no "content"'),
        ([{"role": "user", "content": None}], r'messages\[0\] \(user\) has no "content"'),
        ([{"role": "user", "tool_calls": [1]}], r'messages\[0\] \(user\) has no "content"'),
        ([{"role": "user", "content": 3}], r'messages\[0\]\["content"\] is of type int'),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], r'\["content"\] is of type list.*join'),
    ),
)
def test_bad_messages_are_named(messages, says, chatty):
    with pytest.raises(InputError, match=says):
        encode_chat(chatty, messages)
