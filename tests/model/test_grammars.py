"""Greedy output under a grammar is what transformers' logits and the grammar's mask give, however the work is cut,
cached, preempted or swapped, alone or as several outputs of one prompt.
"""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from quire_engine.core.step import Grammar
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.structured_output.llguidance import Guidance, to_llguidance
from quire_proto.sampling import SamplingParams
from quire_proto.structured_output import Structured, StructuredKind, choice

from tests.model.engine import load, run
from tests.model.models import oracle_model
from tests.support.grammars import EOS, MODEL, VOCAB_SIZE, encode
from tests.support.variants import one_in

TOKENS = 40
PRESSURES = {"no pressure": (300, 0), "recompute": (14, 0), "swap": (14, 100)}
SCHEDULES = [(pressure, caching) for pressure in PRESSURES for caching in ("device", "none")] + [("swap", "host")]
SCHEMA = """{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "tame": {"type": "boolean"},
"ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 4}},
"required": ["name", "tame", "ages"], "additionalProperties": false}"""
GRAMMARS = (
    Structured(StructuredKind.JSON_SCHEMA, SCHEMA),
    Structured(StructuredKind.REGEX, "[A-Z][a-z]{2,20}( [a-z]{1,9}){3,6}\\."),
    choice(["The fox sleeps in the tree.", "The owl flies over the green field at night.", "No."]),
    Structured(StructuredKind.GRAMMAR, 'start: item ("," item)*\nitem: /[0-9]{1,3}/ " " ("cats" | "dogs")'),
    None,
)
PROMPTS = tuple(
    tuple(encode(f"Once upon a time there was a {animal} who lived in a {place}. One day the {animal}"))
    for animal, place in (("fox", "tree"), ("owl", "house"), ("cat", "garden"), ("dog", "box"), ("bear", "forest"))
)


@cache
def executor_of(pressure: str) -> TorchExecutor:
    return load(MODEL, *PRESSURES[pressure])


@cache
def compiled(index: int) -> Grammar | None:
    structured = GRAMMARS[index]
    if structured is None:
        return None
    return Guidance.load(Path(MODEL) / "tokenizer.json", VOCAB_SIZE, [EOS]).compile(to_llguidance(structured))


@cache
@torch.inference_mode()
def expected(index: int, prompt: tuple[int, ...]) -> list[int]:
    """Greedy, from transformers' logits with what the grammar forbids left out."""
    model, grammar = oracle_model(Path(MODEL)), compiled(index)
    matcher = None if grammar is None else grammar.new_matcher()
    ids, kept, output = torch.tensor([prompt]), None, []
    while len(output) < TOKENS:
        made = model(input_ids=ids, past_key_values=kept, use_cache=True)
        kept, logits = made.past_key_values, made.logits[0, -1]
        if matcher is not None:
            words = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
            matcher.fill_bitmask(memoryview(words))
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(logits)].astype(bool)
            logits = logits.masked_fill(~torch.from_numpy(allowed), -torch.inf)
        token_id = int(logits.argmax())
        if token_id == EOS:
            break
        output.append(token_id)
        if matcher is not None:
            matcher.accept_tokens([token_id])
        ids = torch.tensor([[token_id]])
    return output


@pytest.mark.parametrize(("pressure", "caching", "chunk"), list(one_in(2, SCHEDULES, (7, 1 << 20))))
def test_output_under_a_grammar_is_the_same_however_it_is_scheduled(pressure: str, chunk: int, caching: str) -> None:
    jobs = [(index, prompt) for prompt in PROMPTS for index in range(len(GRAMMARS))]
    params = [
        SamplingParams(temperature=0, n=1 + number % 2, max_tokens=TOKENS, structured=GRAMMARS[index])
        for number, (index, _) in enumerate(jobs)
    ]
    made = run(
        executor_of(pressure),
        [list(prompt) for _, prompt in jobs],
        params,
        chunk=chunk,
        prefix_caching=caching != "none",
        host_caching=caching == "host",
        max_num_seqs=8,
        grammars=[compiled(index) for index, _ in jobs],
    )
    for (index, prompt), choices in zip(jobs, made.choices, strict=True):
        assert [each.token_ids for each in choices] == [expected(index, prompt)] * len(choices)
    counted = made.statistics
    assert pressure != "recompute" or counted.preemptions_by_recompute > 0
    assert (counted.preemptions_by_swap > 0) == (pressure == "swap")
