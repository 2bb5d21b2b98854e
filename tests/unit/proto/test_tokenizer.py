"""Model folders: tokens and chat prompts, against transformers' own."""

import json
import tracemalloc
from contextlib import suppress
from itertools import product
from pathlib import Path
from threading import Thread
from time import sleep, thread_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup
from quire_proto.errors import ErrorCode, QuireError, TokenizerLoadError
from quire_proto.text import chat_template as chat_template_module
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.sandbox import bounded
from quire_proto.text.tokenizer import ModelTokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.support.model_folders import CHAT_TEMPLATE, byte_level, sentencepiece_like, write_model_folder

DEMO = Path(__file__).parents[3] / "demo" / "model"
SYSTEM = {"role": "system", "content": "  Be brief. "}
USER = {"role": "user", "content": 'Say "hello" <b>é€😀</b>\n'}
ASSISTANT = {"role": "assistant", "content": "<think>so</think>\n\nhello"}
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "whitespace control": """
        {%- for message in messages %}
            {{- '<|start|>' + message['role'] }}
            {% if not loop.last -%}
            , {% endif %}
    {% if message.content is string %}{{ message.content | trim }}{% endif %}
        {%- endfor -%}
        {{ bos_token }}{{ eos_token }}
    """,
    "namespace and loop controls": (
        "{% set ns = namespace(system='', count=0) %}"
        "{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% continue %}{% endif %}"
        "{% set ns.count = ns.count + 1 %}{% if ns.count > 2 %}{% break %}{% endif %}[{{ m.content }}]{% endfor %}"
        "{{ ns.system }} {{ ns.count }} {{ dict(a=1).a }}"
    ),
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages[0] | tojson(sort_keys=true) }}",
    "no tools, no documents": "{% if tools %}tools{% endif %}{% if documents %}documents{% endif %}"
    "{% if tools is none %}none{% endif %}{{ messages[0].content }}",
    "training marks": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "python methods": "{{ messages[-1].content.split('</think>')[-1].lstrip('\\n') }}{{ messages[1:] | length }}"
    "{{ strftime_now('%Y') }}",
}
ADDED_TOKEN = {"__type": "AddedToken", "content": "<|begin|>", "special": True}
CONVERSATIONS = [[USER], [SYSTEM, USER], [SYSTEM, USER, ASSISTANT, USER]]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=["one", "system", "long"])
def test_chat_prompts_are_those_of_transformers(template, conversation, tmp_path):
    folder = write_model_folder(tmp_path, template=template, config={"bos_token": ADDED_TOKEN})
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False
    )

    assert ModelTokenizer.load(folder).encode_chat(conversation) == expected


PIECES = st.sampled_from(
    ["<|begin|>", "<s>", "</s>", "<|im_end|>", "\0", "\ufdd0", "\u2028", "é", "e\u0301", "  ", "hello world"]
)
TOKENIZERS = {"byte level": byte_level(), "sentencepiece": sentencepiece_like()}


@settings(deadline=None)
@given(st.lists(PIECES | st.text(max_size=20), max_size=6).map("".join), st.sampled_from(sorted(TOKENIZERS)))
def test_texts_are_encoded_as_by_the_tokenizer_itself(text, name):
    tokenizer = TOKENIZERS[name]
    model = ModelTokenizer(Tokenizer.from_str(tokenizer.to_str()), None)
    assert model.encode(text) == tokenizer.encode(text).ids
    assert model.encode_plain(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_other_threads_go_on_while_a_long_text_is_encoded():
    model, turns = ModelTokenizer(byte_level(), None), 0
    text = "the quick brown fox jumps over 13 lazy dogs. " * 20_000
    for encode in (model.encode, model.encode_plain):
        thread, turns = Thread(target=encode, args=(text,)), 0
        thread.start()
        while thread.is_alive():
            sleep(0.0005)
            turns += 1
        assert turns > 20, "an encoding that keeps the interpreter's lock leaves one or two"


def test_half_a_surrogate_pair_is_refused_with_a_message():
    with pytest.raises(QuireError, match="surrogate") as refusal:
        ModelTokenizer(byte_level(), None).encode("a\ud800b")
    assert refusal.value.code == ErrorCode.INVALID


def test_a_text_is_encoded_as_by_transformers(tmp_path):
    folder = write_model_folder(tmp_path)

    assert (
        ModelTokenizer.load(folder).encode("hello café")
        == AutoTokenizer.from_pretrained(folder)("hello café").input_ids
    )


def test_a_text_that_can_never_fit_is_refused_by_its_beginning():
    text = ModelTokenizer(byte_level(), ChatTemplate("{{ messages[0].content }}", {}, "the test"))
    long = "=" * 8000 + "never ending " * 10_000
    for refused in (
        lambda: text.encode(long, 1000),
        lambda: text.encode_chat([{"role": "user", "content": long}], 1000),
    ):
        with pytest.raises(QuireError, match="context length is 1000 tokens") as refusal:
            refused()
        assert (refusal.value.code, refusal.value.param) == (ErrorCode.INVALID, "prompt")


def with_long_tokens() -> ModelTokenizer:
    tokenizer = type(byte_level()).from_str(byte_level().to_str())
    tokenizer.add_tokens(["=" * 128, "hello " * 20])
    return ModelTokenizer(tokenizer, None)


LONG_TOKENS = with_long_tokens()


@given(st.lists(st.tuples(st.sampled_from(["=", "hello ", "€"]), st.integers(0, 3000)), max_size=4))
@settings(deadline=None, max_examples=30)
def test_no_text_that_fits_is_refused_however_long_its_tokens_are(parts):
    text = "".join(piece * times for piece, times in parts)
    tokens = LONG_TOKENS.encode(text)

    assert LONG_TOKENS.encode(text, len(tokens)) == tokens


def test_truncation_and_padding_in_the_file_do_not_apply(tmp_path):
    tokenizer = type(byte_level()).from_str(byte_level().to_str())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    folder = write_model_folder(tmp_path, tokenizer)

    assert ModelTokenizer.load(folder).encode("hello world " * 9) == byte_level().encode("hello world " * 9).ids


@pytest.mark.parametrize(
    "chat_template",
    [CHAT_TEMPLATE, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHAT_TEMPLATE}]],
    ids=["string", "list"],
)
def test_the_template_may_stand_in_the_configuration(chat_template, tmp_path):
    beside = write_model_folder(tmp_path / "beside")
    inside = write_model_folder(tmp_path / "inside", template=None, config={"chat_template": chat_template})

    assert ModelTokenizer.load(inside).encode_chat([USER]) == ModelTokenizer.load(beside).encode_chat([USER])


def test_the_template_file_counts_more_than_the_configuration(tmp_path):
    folder = write_model_folder(tmp_path, template="hello", config={"chat_template": "world"})

    assert ModelTokenizer.load(folder).encode_chat([USER]) == byte_level().encode("hello", add_special_tokens=False).ids


def test_a_template_that_raises_is_refused_with_its_own_message(tmp_path):
    folder = write_model_folder(tmp_path, template="{{ raise_exception('Roles must alternate') }}")

    with pytest.raises(QuireError, match="Roles must alternate") as refusal:
        ModelTokenizer.load(folder).encode_chat([USER])
    assert (refusal.value.code, refusal.value.param) == (ErrorCode.INVALID, "messages")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[9].content }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append({}) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ namespace.__init__.__globals__ }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% include '/etc/passwd' %}",
        "{{ missing.attribute }}",
    ],
)
def test_a_template_that_fails_or_reaches_outside_is_a_refusal_without_internals(template, tmp_path):
    text = ModelTokenizer.load(write_model_folder(tmp_path, template=template))

    with pytest.raises(QuireError) as refusal:
        text.encode_chat([USER])
    assert refusal.value.code == ErrorCode.INVALID
    assert "class" not in refusal.value.message
    assert "root" not in refusal.value.message


DOUBLE = "{% set ns = namespace(s='a' * 1000, n=1) %}{% for _ in range(60) %}"
NEST = "{% set ns = namespace(s=[1]) %}{% for _ in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"
TUPLES = "{% set ns = namespace(s=(1,)) %}{% for _ in range(60) %}{% set ns.s = (ns.s, ns.s) %}{% endfor %}"
TWINS = (
    "{% set ns = namespace(s=(1,), t=(1,)) %}"
    "{% for _ in range(60) %}{% set ns.s = (ns.s, ns.s) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
    "{% set a, b = namespace(s=ns.s), namespace(s=ns.t) %}"
)
HALVES = "{% set half = 'a' * 10000 ~ 'b' ~ 'a' * 10000 %}{% set s = 'a' * 60000 %}"
HOLD = "{% set ns = namespace(s=[], d={}) %}{% for i in range(3000) %}"
EXCESSES = {
    "power": "{{ (10**6)**(10**6) }}",
    "product": "{{ 'a' * 2000000000 }}",
    "product of lists": "{{ ([1] * 2000000000) | length }}",
    "centred text": "{{ 'a'.center(3000000000) }}",
    "filter that centres": "{{ 'a' | center(3000000000) }}",
    "centred bytes": "{{ 'a'.encode().center(3000000000) }}",
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "recursive loops": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth0 < 100 }}{% endfor %}",
    "recursive macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(90) }}",
    "sums": DOUBLE + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "joined": DOUBLE + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "blocks": DOUBLE + "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "macros": "{% macro d(s) %}{{ s }}{{ s }}{% endmacro %}" + DOUBLE + "{% set ns.s = d(ns.s) %}{% endfor %}",
    "output": "{% set s = 'a' * 60000 %}{% for _ in range(9999) %}{{ s }}{% endfor %}",
    "products of numbers": DOUBLE + "{% set ns.n = (ns.n + 1) * (ns.n + 1) %}{% endfor %}",
    "replaced": "{% set s = 'a' * 10000 %}{{ s.replace('a', s) }}",
    "filter that replaces": "{% set s = 'a' * 10000 %}{{ s | replace('a', s) }}",
    "separator": "{% set s = 'a' * 10000 %}{{ s.join(s) }}",
    "filter that joins": "{% set s = 'a' * 10000 %}{{ s | join(s) }}",
    "mapped": "{% set s = 'a' * 10000 %}{{ [s] | map('replace', 'a', s) | list | length }}",
    "indented": "{{ ('\n' * 10000) | indent(9999) | length }}",
    "tabs": "{{ ('\t' * 10000).expandtabs(9999) | length }}",
    "translated": "{% set s = 'a' * 10000 %}{{ s.translate({97: s}) }}",
    "format": "{{ '{:>3000000000}'.format('a') }}",
    "format with a width beside it": "{{ '{:>{}}'.format('a', 3000000000) }}",
    "format of many": "{% set s = 'a' * 10000 %}{{ ('{0}' * 10000).format(s) }}",
    "percent": "{{ '%3000000000d' % 1 }}",
    "percent with a width beside it": "{{ '%*d' % (3000000000, 1) }}",
    "filter that formats": "{{ '%3000000000d' | format(1) }}",
    "lists in lists": NEST + "{{ ns.s }}",
    "JSON of lists in lists": NEST + "{{ ns.s | tojson }}",
    "values of dictionaries": NEST + "{{ {'a': ns.s}.values() }}",
    "JSON in a longer text": NEST + "{{ 'a' ~ {'a': ns.s}.items() }}",
    "indented JSON": "{{ [1] | tojson(indent=3000000000) }}",
    "summed lists": "{{ [[1] * 10000] * 10000 | sum(start=[]) }}",
    "rounded": "{{ 1.5 | round(999999999, 'ceil') }}",
    "bytes of a number": "{{ (5).to_bytes(3000000000, 'big') }}",
    "equal lists in lists": TWINS + "{{ ns.s == ns.t }}",
    "unequal lists in lists": TWINS + "{{ ns.s != ns.t }}",
    "ordered lists in lists": TWINS + "{{ 1 < 2 and ns.s < ns.t }}",
    "chained comparisons": TWINS + "{{ ns.s <= ns.t <= ns.s }}",
    "sought lists in lists": TWINS + "{{ ns.s in [ns.t] }}",
    "sought in a chain": TWINS + "{{ ns.s in [ns.t] in [ns] }}",
    "test of equality": TWINS + "{{ ns.s is eq(ns.t) }}",
    "test of being in": TWINS + "{{ ns.s is in([ns.t]) }}",
    "selected lists in lists": TWINS + "{{ [ns.s] | select('eq', ns.t) | list | length }}",
    "selected entries": "{% set r = range(9999) %}{{ r | select('in', r | list) | list | length }}",
    "rejected entries": "{% set r = range(9999) %}{{ r | reject('in', r | list) | list | length }}",
    "sorted lists in lists": TWINS + "{{ [ns.s, ns.t] | sort | length }}",
    "sorted by an attribute": TWINS + "{{ [a, b] | sort(attribute='s') | length }}",
    "largest list in lists": TWINS + "{{ [ns.s, ns.t] | max | length }}",
    "smallest by an attribute": TWINS + "{{ ([a, b] | min(attribute='s')).s | length }}",
    "grouped by an attribute": TWINS + "{{ [a, b] | groupby('s') | length }}",
    "grouped by a default": TWINS + "{{ [{'s': ns.s}, {}] | groupby('s', default=ns.t) | length }}",
    "sorted dictionary": TWINS + "{{ {1: ns.s, 2: ns.t} | dictsort(by='value') | length }}",
    "unique tuples": TUPLES + "{{ [ns.s] | unique | list | length }}",
    "unique by an attribute": TWINS + "{{ [a] | unique(attribute='s') | list | length }}",
    "key of a dictionary": TUPLES + "{{ {ns.s: 1} | length }}",
    "key of a dictionary of pairs": TUPLES + "{{ dict([(ns.s, 1)]) | length }}",
    "key of a dictionary of mapped pairs": TUPLES + "{{ dict([[ns.s, 1]] | map('list')) | length }}",
    "keys of a dictionary": TUPLES + "{{ {}.fromkeys([[ns.s]] | map('first')) | length }}",
    "key that is looked up": TUPLES + "{{ {}[ns.s] }}",
    "key that is asked for": TUPLES + "{{ {}.get(ns.s) }}",
    "difference of items": TUPLES + "{{ ({1: ns.s}.items() - [1]) | length }}",
    "disjoint items": TWINS + "{{ {1: ns.s}.items().isdisjoint({1: ns.t}.items()) }}",
    "position in a list": TWINS + "{{ [ns.s].index(ns.t) }}",
    "test of lower case": NEST + "{{ ns.s is lower }}",
    "test for a filter": TUPLES + "{{ ns.s is filter }}",
    "test of a format": "{{ '%3000000000d' is divisibleby(1) }}",
    "test of an odd format": "{{ '%3000000000d' is odd }}",
    "upper case": NEST + "{{ ns.s | upper }}",
    "replaced lists in lists": NEST + "{{ 'a' | replace(ns.s, 'b') }}",
    "changes in a loop": TWINS + "{% for each in [ns.s, ns.t] %}{{ loop.changed(each) }}{% endfor %}",
    "nothing, again and again": "{% set s = [[none] * 10000] * 10000 %}{{ s == messages }}",
    "many texts": HOLD + "{% set ns.s = [ns.s, i ~ 'a' * 60000] %}{% endfor %}",
    "many texts in a list": HOLD + "{% set ns.s = ns.s + ['a' * 60000 ~ i] %}{% endfor %}",
    "many texts in a dictionary": HOLD + "{% set ns.d = dict(ns.d, **{'k%d' % i: 'a' * 60000 ~ i}) %}{% endfor %}",
    "many texts of a filter": "{{ range(5000) | map('string') | map('center', 10000) | list | length }}",
    "many lists": HOLD + "{% set ns.s = [ns.s, ('ab ' * 20000).split()] %}{% endfor %}",
    "many slices": "{% set s = 'a' * 60000 %}" + HOLD + "{% set ns.s = [ns.s, s[i:]] %}{% endfor %}",
    "many blocks": HOLD + "{% set s %}{{ 'a' * 60000 }}{{ i }}{% endset %}{% set ns.s = [ns.s, s] %}{% endfor %}",
    "a refusal": NEST + "{{ raise_exception(ns.s) }}",
    "codec": "{{ ('a' * 60000).encode('punycode') }}",
    "codec of bytes": "{{ ('a' * 60000).encode().decode(encoding='punycode') }}",
    "names of characters": "{{ ('é' * 60000).encode('ascii', 'namereplace') }}",
    "sought from the end": HALVES + "{{ s.rfind(half) }}",
    "sought from the end of a safe text": HALVES + "{{ (s | safe).rsplit(half) }}",
    "split from the end": HALVES + "{{ s.rpartition(half) }}",
    "stripped of many": "{{ ('a' * 60000).strip('b' * 60000 ~ 'a') }}",
    "filter that strips": "{{ ('a' * 60000) | trim('b' * 60000 ~ 'a') }}",
    "beginnings": "{% set s = 'a' * 60000 %}{{ (s ~ 'a').startswith(([s ~ 'b'] * 9999) | list) }}",
    "number in bytes": "{{ (0).from_bytes(('a' * 60000).encode(), 'big') // 3 }}",
    "number in hexadecimal": "{{ ('a' * 60000) | int(base=16) // 3 }}",
    "pattern of a date": "{{ strftime_now('%Y' * 60000) }}",
}


@pytest.fixture
def smaller_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sixteenth of the usual number of characters, since tracemalloc makes counting them slow, and less time."""
    monkeypatch.setattr(chat_template_module, "_CHARACTERS", 2**16)
    monkeypatch.setattr(chat_template_module, "_SECONDS", 0.2)


@pytest.mark.usefixtures("smaller_limits")
@pytest.mark.parametrize("source", EXCESSES.values(), ids=EXCESSES.keys())
def test_a_template_that_takes_too_much_time_or_memory_is_a_refusal(source):
    template = ChatTemplate("{% if messages | length > 1 %}" + source + "{% endif %}", {}, "the test")
    assert not template.is_slow
    begun = thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(QuireError, match="too much time or memory") as refusal:
            template.render([USER] * 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert refusal.value.code == ErrorCode.INVALID
    assert peak < 50e6
    assert thread_time() - begun < 10


HOSTILE = "a" * 50_000 + "b" + "a" * 50_000
ARGUMENTS = ["s", "half", "'punycode'"]


@pytest.mark.parametrize("value", ["s", "s | safe", "s.encode()", "1"])
def test_no_method_of_a_text_or_number_takes_longer_than_the_template_may(value):
    """Whatever methods there are, in this version of Python or a later one."""
    kinds = {"s | safe": Markup, "s.encode()": bytes, "1": int}
    names = [name for name in dir(kinds.get(value, str)) if not name.startswith("_")]
    environment = chat_template_module._environment()
    for name, arguments in product(names, ARGUMENTS):
        source = f"{{% set x = {value} %}}{{% set y = x.{name}({arguments}) %}}"
        template = environment.from_string(environment.counted(source))
        begun = thread_time()
        with bounded(0.5, 2**20), suppress(*chat_template_module._RENDER_ERRORS):
            template.render(s="a" * 100_000, half=HOSTILE)
        assert thread_time() - begun < 1, source


def test_a_template_that_is_longer_than_any_is_not_compiled():
    with pytest.raises(TokenizerLoadError, match=r"the chat template has 300000 characters"):
        ChatTemplate("a" * 300_000, {}, "the test")


def test_unique_compares_a_namespaces_values_at_that_time():
    source = TUPLES + "{% set a = namespace(s=1) %}{% set found = [a] | unique(attribute='s') %}{% set a.s = ns.s %}"
    source += "{% for each in found %}{{ each }}{% endfor %}"
    assert ChatTemplate(source, {}, "the test").render([USER]) == "<Namespace>"


def test_texts_that_a_template_discards_do_not_count():
    source = HOLD + "{% set ns.s = 'a' * 100000 ~ i %}{% endfor %}{{ ns.s | length }}"
    template = ChatTemplate("{% if messages | length > 1 %}" + source + "{% endif %}", {}, "the test")
    assert template.render([USER] * 1000) == "100004"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0] == messages[1] }} {{ messages[0] in messages }} {{ messages != tools }}",
        "{% for m in messages %}{{ m.role == messages[-1].role }}{{ 1 < loop.index <= messages | length }}{% endfor %}",
        "{{ messages | map(attribute='content') | unique | sort | join('-') }} {{ [3, 1] | max }}",
        "{{ messages | groupby('role') | length }}"
        "{{ messages | sort(attribute='role,content') | map(attribute='role') | join }}",
        "{{ messages | selectattr('role', 'in', ['user', 'tool']) | list | length }}",
        "{{ {messages[0].role: none}[messages[0].role] }} {{ messages[1:] }} {{ [none, 1, {'a': ()}] }} {{ missing }}",
        "{{ 'a' in 'abc' }} {{ messages[0].role in messages[0] }} {{ [1, 2].index(2) }} {{ 5 - 2.5 }}",
    ],
)
def test_comparisons_within_the_bounds_render_as_in_jinja(source):
    source = source.replace("", "")
    messages = [USER, {"role": "assistant", "content": "No."}, dict(USER)]
    expected = ImmutableSandboxedEnvironment().from_string(source).render(messages=messages, tools=None)
    assert ChatTemplate(source, {}, "the test").render(messages) == expected


def test_a_slow_template_is_found_before_the_first_request():
    assert ChatTemplate(EXCESSES["nested loops"], {}, "the test").is_slow
    assert not ChatTemplate(CHAT_TEMPLATE, {}, "the test").is_slow


def test_a_namespace_is_written_without_its_values():
    assert ChatTemplate(NEST + "{{ ns }}", {}, "the test").render([USER]) == "<Namespace>"


def test_a_memory_error_is_a_refusal(monkeypatch):
    def fail(*_args, **_kwargs):
        raise MemoryError

    monkeypatch.setattr(json, "dumps", fail)
    with pytest.raises(QuireError) as refusal:
        ChatTemplate("{{ messages | tojson }}", {}, "the test").render([USER])
    assert refusal.value.code == ErrorCode.INVALID


@pytest.mark.parametrize("count", [1, 4096])
def test_long_conversations_are_rendered_within_the_bounds(count):
    messages = [{"role": "user", "content": "<b>" * (10**6 // count)}] * count
    source = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}" + (
        "{{ m.content.replace('<b>', '').replace('x', 'yy') | trim | indent(2) ~ '\n' }}{{ m | tojson }}{% endfor %}"
    )
    assert len(ChatTemplate(source, {}, "the test").render(messages)) > 2 * 10**6


@pytest.mark.parametrize(
    "reach",
    [
        "raise_exception.__globals__",
        "messages.__class__",
        "''.__mod__",
        "(messages | attr('__class__'))",
        "self._TemplateReference__context",
    ],
)
def test_a_template_that_reaches_for_internals_finds_nothing(reach, tmp_path):
    folder = write_model_folder(tmp_path, template="found: {{ " + reach + " }}")

    assert (
        ModelTokenizer.load(folder).encode_chat([USER]) == byte_level().encode("found: ", add_special_tokens=False).ids
    )


def test_a_model_without_a_template_refuses_conversations_only(tmp_path):
    text = ModelTokenizer.load(write_model_folder(tmp_path, template=None))

    assert text.encode("hello")
    with pytest.raises(QuireError, match="no chat template"):
        text.encode_chat([USER])


def test_a_configuration_is_not_needed(tmp_path):
    folder = write_model_folder(tmp_path)
    (folder / "tokenizer_config.json").unlink()

    assert ModelTokenizer.load(folder).encode_chat([USER])


def test_code_that_a_folder_brings_is_not_run(tmp_path):
    folder = write_model_folder(tmp_path, config={"auto_map": {"AutoTokenizer": ["evil.Evil", None]}})
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    ModelTokenizer.load(folder)

    assert not (tmp_path / "ran").exists()


def test_a_file_in_place_of_a_folder_is_refused(tmp_path):
    file = write_model_folder(tmp_path) / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(TokenizerLoadError, match=f"^{file} is a file: name the folder"):
        ModelTokenizer.load(file)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", byte_level().to_str()[:500]),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", json.dumps({"chat_template": 7})),
        ("tokenizer_config.json", json.dumps({"chat_template": "{% if %}"})),
        ("chat_template.jinja", "{% for message in messages %}"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_broken_folder_is_named_with_file_and_problem(file, content, tmp_path):
    folder = write_model_folder(tmp_path, template=CHAT_TEMPLATE if file == "chat_template.jinja" else None)
    path = folder / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(TokenizerLoadError) as problem:
        ModelTokenizer.load(folder)
    assert str(path) in str(problem.value)
    assert "\n" not in str(problem.value)


@pytest.mark.skipif(not (DEMO / "tokenizer.json").exists(), reason="the demo model is not built")
def test_the_demo_models_prompts_are_those_of_transformers():
    text, oracle = ModelTokenizer.load(DEMO), AutoTokenizer.from_pretrained(DEMO)
    for conversation in CONVERSATIONS:
        expected = oracle.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        assert text.encode_chat(conversation) == expected
    words = "How much is 7 + 8? naïve € 😀"
    assert text.encode(words) == oracle(words).input_ids


def test_sentencepiece_folders_load_too(tmp_path):
    text = ModelTokenizer.load(write_model_folder(tmp_path, sentencepiece_like(), config={"eos_token": "</s>"}))

    assert text.encode("hello world") == sentencepiece_like().encode("hello world").ids
    assert text.vocab_size == sentencepiece_like().get_vocab_size()
