"""Conversations have the prompts that transformers gives them, with templates in the manner of those that are
published, and, in the long form, with the published ones themselves (``published_templates.json``).
"""

import hashlib
import json

import pytest
from quire_proto.text.chat_template import ChatTemplate

from tests.support.conversations import (
    AS_IT_IS,
    CONVERSATIONS,
    FIXTURE,
    REFUSED,
    SERVED,
    SPELLINGS,
    TOKENS,
    compared,
    digest,
    fetched,
    rendered_here,
    standing_clock,
    templates_in,
)
from tests.support.tool_models import HERMES_TEMPLATE, LLAMA_TEMPLATE, OPENING_TEMPLATE, THINKING_TEMPLATE

PUBLISHED = json.loads(FIXTURE.read_text(encoding="utf-8"))
LOOP = "{{ bos_token }}{% for m in messages %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
)
CALLS_AS_TEXT = "{% for c in m.tool_calls or [] %}{{ '(' + c.function.arguments + ')' }}{% endfor %}"
DATE = "{{ strftime_now('%d %b %Y') }}"
MANNERS = {
    "Hermes": HERMES_TEMPLATE,
    "Llama": LLAMA_TEMPLATE,
    "switched thinking": THINKING_TEMPLATE,
    "opened thinking": OPENING_TEMPLATE,
    "reasoning_content": LOOP + "{{ m.reasoning_content }}{{ m.content }}" + CALLS + "{% endfor %}",
    "thinking": LOOP + "{{ m.thinking }}{{ m.content }}" + CALLS + "{% endfor %}",
    "any reasoning": LOOP + "{{ m.thinking or m.reasoning or m.reasoning_content }}{{ m.content }}{% endfor %}",
    "a date": DATE + LOOP + "{{ m.role }}{{ m.content }}{% endfor %}",
    "no system": LOOP + "{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}",
    "arguments as text": LOOP + "{{ m.content }}" + CALLS_AS_TEXT + "{% endfor %}",
    "null beside calls": (
        LOOP + "{% if m.content is none %}" + CALLS_AS_TEXT + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "parts": LOOP + "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}",
    "short ids": LOOP + "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('9') }}"
    "{% endif %}{% endfor %}{{ m.content }}" + CALLS + "{% endfor %}",
    "text or thinking": LOOP + "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}"
    "{% endif %}{{ m.thinking }}{{ m.content }}" + CALLS + "{% endfor %}",
}  # fmt: skip
WITH_CALLS = {
    name for name, each in CONVERSATIONS.items() if any("tool_calls" in message for message in each["messages"])
}
OTHERWISE = {
    "no system": {"system": REFUSED},
    "arguments as text": dict.fromkeys(WITH_CALLS, "arguments as text"),
    "null beside calls": dict.fromkeys(WITH_CALLS - {"call with text"}, "null beside calls, arguments as text"),
    "parts": dict.fromkeys(CONVERSATIONS.keys() - {"parts"}, "in parts"),
    "short ids": dict.fromkeys(WITH_CALLS, SERVED),
}
"""What has another spelling with a template; else only parts, and null, have one."""


@pytest.mark.parametrize("manner", MANNERS)
def test_a_conversation_has_the_prompt_that_transformers_gives_it(manner):
    plain = {AS_IT_IS, "parts joined, empty for null"}
    found = {name: how for name, (how, _) in compared(MANNERS[manner]).items() if how not in plain}

    assert found == OTHERWISE.get(manner, {})


def test_each_published_template_has_its_source_its_licence_and_its_renderings():
    rows = PUBLISHED["templates"]

    assert len(rows) > 100
    for row in rows:
        assert row["package"] in PUBLISHED["packages"]
        assert (row["licence"] in ("Apache-2.0", "MIT"), len(row["sha256"]), len(row["digests"])) == (True, 64, 14)
        assert set(row["spellings"].values()) <= {*SPELLINGS, REFUSED, SERVED}
        unserved = {name for name, how in row["spellings"].items() if how in (REFUSED, SERVED)}
        assert [each is None for each in row["digests"]] == [name in unserved for name in CONVERSATIONS]


@pytest.mark.soak
def test_published_templates_render_as_in_transformers(tmp_path):
    rows = {(row["package"], row["file"]): row for row in PUBLISHED["templates"]}
    archives = fetched(PUBLISHED["packages"], tmp_path)
    sources = {(archive.name, name): source for archive in archives for name, source, _ in templates_in(archive)}

    assert sources.keys() == rows.keys()
    with standing_clock():
        differing = [key for key, row in rows.items() if renderings(sources[key], row) != row["digests"]]
    assert differing == []


def renderings(source, row):
    """The digests of the renderings here, in the form of the fixture."""
    assert hashlib.sha256(source.encode()).hexdigest() == row["sha256"]
    template, found = ChatTemplate(source, TOKENS, row["file"]), []
    for name, conversation in CONVERSATIONS.items():
        text = rendered_here(template, conversation)
        how = row["spellings"].get(name, AS_IT_IS)
        assert (text is None) == (how == REFUSED), (row["file"], name)
        found.append(None if how == SERVED else digest(text))
    return found
