"""One step's draws: each is what it would be alone, fails alone, and never depends on what was kept from before."""

import logging
import math
import random
import threading
from collections.abc import Sequence
from concurrent.futures import wait

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.core.step import ModelOutput, SampleRequest
from quire_engine.sampling.logits_processors import SamplingState
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import MAX_SEED, SamplingParams
from quire_proto.structured_output import choice

from tests.support.sampling_inputs import (
    KeepingSampler,
    ModuloGrammar,
    ModuloMatcher,
    Output,
    answers,
    make_output,
    run_step,
    some_logits,
    some_tokens,
)

VOCAB = 50
tokens = st.integers(0, VOCAB - 1)
words = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def outputs(draw: st.DrawFn, id: int = 0) -> Output:
    """Any draw at all: greedy or not, beams, every parameter on or off."""
    wanted = draw(
        st.fixed_dictionaries(
            {"temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]), "min_tokens": st.sampled_from([0, 0, 3, 30])},
            optional={
                "top_k": st.sampled_from([0, 1, 5, VOCAB]),
                "top_p": st.sampled_from([0.3, 0.95]),
                "min_p": st.sampled_from([0.01, 0.4]),
                "repetition_penalty": st.sampled_from([0.5, 1.3]),
                "frequency_penalty": st.sampled_from([-1.0, 0.7]),
                "presence_penalty": st.sampled_from([-0.5, 1.9]),
                "logit_bias": st.dictionaries(tokens, st.floats(-100, 100), max_size=5).map(lambda d: (*d.items(),)),
                "bad_words": st.lists(words, max_size=6).map(tuple),
                "logprobs": st.integers(0, 20),
                "best_of": st.just(2),
            },
        )
    )
    params = SamplingParams(max_tokens=100, **wanted)
    candidates = draw(st.sampled_from([0, 0, 0, 1, 7, 99]))
    grammar = draw(st.sampled_from([None, None, ModuloGrammar(2), ModuloGrammar(5), ModuloGrammar(1)]))
    prompt, output = draw(st.lists(tokens, max_size=8)), draw(st.lists(st.integers(0, 5), max_size=8))
    stops, seed = draw(st.frozensets(tokens, max_size=3)), draw(st.integers(0, MAX_SEED))
    return Output(id, SampleRequest(params, seed, len(prompt), stops, grammar, candidates), prompt + output)


def alone(output: Output, logits: torch.Tensor) -> ModelOutput:
    sampler = KeepingSampler(len(logits))
    model_output = run_step(sampler, [output], logits[None])
    sampler.close()
    return model_output


def assert_same(made: ModelOutput, expected: ModelOutput) -> None:
    """Down to the last bit of every log-probability."""
    for part in ("token_ids", "logprobs", "candidates"):
        assert getattr(made, part) == getattr(expected, part)
    assert {id: error_fields(error) for id, error in made.errors.items()} == {
        id: error_fields(error) for id, error in expected.errors.items()
    }


def error_fields(error: QuireError) -> tuple[ErrorCode, str, str | None]:
    return error.code, error.message, error.param


def merged(model_outputs: Sequence[ModelOutput]) -> ModelOutput:
    whole = ModelOutput({})
    for each in model_outputs:
        for part in ("token_ids", "logprobs", "candidates", "errors"):
            getattr(whole, part).update(getattr(each, part))
    return whole


# Together and alone


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_draw_is_the_same_alone_and_among_any_others(data: st.DataObject) -> None:
    batch = [data.draw(outputs(id)) for id in range(data.draw(st.integers(1, 8)))]
    logits = some_logits(len(batch), VOCAB, data.draw(st.integers(0, 99)))
    if data.draw(st.booleans()):
        logits = logits.round()
    if data.draw(st.booleans()):
        logits = logits.bfloat16()
    if data.draw(st.integers(0, 4)) == 0:
        logits[data.draw(st.integers(0, len(batch) - 1)), 3] = math.nan
    expected = [alone(output, row) for output, row in zip(batch, logits, strict=True)]
    order = data.draw(st.permutations(range(len(batch))))
    sampler = KeepingSampler(VOCAB)
    made = run_step(sampler, [batch[place] for place in order], logits[order])
    sampler.close()
    assert_same(made, merged(expected))
    for output in batch:
        assert sum(output.id in part for part in (made.token_ids, made.candidates, made.errors)) == 1
        assert (output.id in made.logprobs) == (output.params.wants_logprobs and output.id in made.token_ids)


@settings(deadline=None)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=12))
def test_each_draw_is_made_from_the_row_that_it_names(rows: list[int]) -> None:
    logits = some_logits(2, VOCAB)
    styles = [{}, {"temperature": 1.5}, {"temperature": 1.5, "repetition_penalty": 1.1}, {"num_candidates": 2}]
    batch = [make_output(id, [1, 2], seed=id, logprobs=2, **styles[id % 4]) for id in range(len(rows))]
    sampler = KeepingSampler(VOCAB)
    made = answers(sampler.sample(sampler.prepare_outputs(batch), logits, rows))
    assert_same(made, run_step(KeepingSampler(VOCAB), batch, logits[rows]))
    assert_same(made, merged([alone(output, logits[row]) for output, row in zip(batch, rows, strict=True)]))


def test_the_models_logits_are_left_as_they_were() -> None:
    logits = some_logits(3, VOCAB)
    before = logits.clone()
    wanted = {"logit_bias": ((1, 9.0),), "repetition_penalty": 2.0}
    batch = [
        make_output(0, [1], **wanted),
        make_output(1, [1], num_candidates=3, **wanted),
        make_output(2, [1]),
    ]
    run_step(KeepingSampler(VOCAB), batch, logits)
    run_step(KeepingSampler(VOCAB), batch[:1], logits[:1])
    assert torch.equal(logits, before)


# What is kept between steps


def advance(batch: Sequence[Output], made: ModelOutput) -> None:
    for output in batch:
        if output.id in made.candidates:
            output.token_ids.append(made.candidates[output.id].token_ids[-1])
        else:
            output.token_ids.append(made.token_ids.get(output.id, 1))


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(0, 2**32))
def test_what_is_kept_makes_no_difference_whenever_it_is_dropped(data: st.DataObject, seed: int) -> None:
    batch, chance = [data.draw(outputs(id)) for id in range(5)], random.Random(seed)
    kept, dropped = KeepingSampler(VOCAB), KeepingSampler(VOCAB)
    for step in range(8):
        chosen = [request for request in batch if chance.random() < 0.8]
        logits = some_logits(len(chosen), VOCAB, step).round()
        for output in batch:
            if chance.random() < 0.4:
                dropped.states.pop(output.id, None)
        made = run_step(kept, chosen, logits)
        assert_same(made, run_step(dropped, chosen, logits))
        assert_same(made, merged([alone(output, row) for output, row in zip(chosen, logits, strict=True)]))
        advance(chosen, made)
    kept.close()
    dropped.close()


def test_min_tokens_and_bad_words_cost_nothing_while_they_forbid_nothing() -> None:
    wanted = {"min_tokens": 2, "stop_token_ids": frozenset((7,)), "bad_words": ((4, 5),)}
    output = make_output(0, [1], [2], **wanted)
    state = SamplingState(output.request, VOCAB)
    assert not state.has_processors
    costs = [bool(state.bans.token_ids(output.known))]
    for token_id in (3, 4, 6):
        output.token_ids.append(token_id)
        costs.append(bool(state.bans.token_ids(output.known)))
    assert costs == [True, False, True, False]


# Log-probabilities


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_the_models_own_whatever_the_parameters_do(dtype: torch.dtype) -> None:
    logits = some_logits(4, VOCAB).round().to(dtype)
    changes = {"temperature": 1.7, "logit_bias": ((3, 50.0),), "repetition_penalty": 2.0, "top_k": 4}
    batch = [
        make_output(0, [1], logprobs=20),
        make_output(1, [1], logprobs=3, **changes),
        make_output(2, [1], best_of=2, **changes),
        make_output(3, [1], **changes),
    ]
    made = run_step(KeepingSampler(VOCAB), batch, logits)
    expected = logits.float().log_softmax(-1)
    for row, count in ((0, 20), (1, 3), (2, 0)):
        ranked = sorted(enumerate(expected[row].tolist()), key=lambda pair: (-pair[1], pair[0]))
        assert made.logprobs[row].logprob == expected[row, made.token_ids[row]].item()
        assert made.logprobs[row].top == tuple(ranked[:count])
    assert 3 not in made.logprobs


# Beams


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=40), st.integers(1, 45))
def test_candidates_are_the_best_by_logprob_and_then_by_token_id(levels: list[int], count: int) -> None:
    logits = torch.tensor([levels], dtype=torch.float32)
    made = run_step(KeepingSampler(len(levels)), [make_output(0, [0], num_candidates=count)], logits).candidates[0]
    ranked = sorted(enumerate(logits.log_softmax(-1)[0].tolist()), key=lambda pair: (-pair[1], pair[0]))[:count]
    assert list(zip(made.token_ids, made.logprobs, strict=True)) == ranked


def test_candidates_are_normalised_first_and_processed_then() -> None:
    wanted = {"repetition_penalty": 1.5, "logit_bias": ((9, 2.0),), "bad_words": ((4,),), "num_candidates": VOCAB}
    output = make_output(0, [3, 3], [5], presence_penalty=0.5, **wanted)
    logits = some_logits(1, VOCAB)
    expected = logits.log_softmax(-1)[0]
    expected[9] += 2.0
    expected[[3, 5]] *= 1.5
    expected[5] -= 0.5
    made = run_step(KeepingSampler(VOCAB), [output], logits).candidates[0]
    assert set(made.token_ids) == set(range(VOCAB)) - {4}
    assert made.logprobs == expected[made.token_ids].tolist()
    assert made.logprobs == sorted(made.logprobs, reverse=True)


# Grammars


def test_an_output_follows_its_grammar_and_the_others_do_not_notice() -> None:
    grammar, sampler = ModuloGrammar(3), KeepingSampler(VOCAB)
    constrained, free = make_output(0, [1, 1], grammar=grammar), make_output(1, [1, 1])
    for step in range(12):
        logits = some_logits(1, VOCAB, step).expand(2, -1)
        made = run_step(sampler, [constrained, free], logits).token_ids
        assert grammar.allows(constrained.token_ids[2:], made[0])
        assert made[1] == logits[1].argmax()
        allowed = [token_id for token_id in range(VOCAB) if grammar.allows(constrained.token_ids[2:], token_id)]
        assert made[0] == allowed[int(logits[0, allowed].argmax())]
        constrained.token_ids.append(made[0])


def test_tokens_outside_of_a_grammars_vocabulary_are_forbidden() -> None:
    output = make_output(0, [1], grammar=ModuloGrammar(2, vocab_size=40))
    logits = torch.arange(100.0)[None]
    assert run_step(KeepingSampler(100), [output], logits).token_ids == {0: 39}


def test_masks_are_filled_while_the_step_runs() -> None:
    may_fill, sampler = threading.Event(), KeepingSampler(VOCAB)

    class Slow(ModuloMatcher):
        def fill_bitmask(self, mask: memoryview) -> None:
            assert may_fill.wait(timeout=30)
            assert threading.current_thread() is not threading.main_thread()
            super().fill_bitmask(mask)

    class Grammar(ModuloGrammar):
        def new_matcher(self) -> ModuloMatcher:
            return Slow(self)

    pending = sampler.prepare_outputs([make_output(0, [1], grammar=Grammar(2))])
    may_fill.set()
    assert answers(sampler.sample(pending, torch.arange(float(VOCAB))[None], [0])).token_ids == {0: 49}


def test_a_step_that_was_started_and_never_finished_can_be_started_again() -> None:
    sampler, logits = KeepingSampler(VOCAB), some_logits(1, VOCAB)
    output = make_output(0, [1], [2, 3], grammar=ModuloGrammar(5))
    sampler.prepare_outputs([output])
    made = run_step(sampler, [output], logits).token_ids[0]
    output.token_ids.append(made)
    sampler.prepare_outputs([output])
    again = run_step(sampler, [output], logits)
    assert_same(again, alone(make_output(0, [1], [2, 3, made], grammar=ModuloGrammar(5)), logits[0]))


def test_a_matcher_takes_an_output_in_order_however_long_a_step_before_took() -> None:
    may_accept, sampler = threading.Event(), KeepingSampler(VOCAB)

    class Slow(ModuloMatcher):
        def accept_tokens(self, token_ids: Sequence[int]) -> None:
            assert may_accept.wait(timeout=30)
            super().accept_tokens(token_ids)

    class Grammar(ModuloGrammar):
        def new_matcher(self) -> ModuloMatcher:
            return Slow(self)

    output, logits = make_output(0, [1], [2, 3], grammar=Grammar(5)), some_logits(1, VOCAB)
    sampler.prepare_outputs([output])
    pending = sampler.prepare_outputs([output])
    assert pending.bitmask is not None
    assert not wait([pending.bitmask.errors], timeout=0.05).done
    may_accept.set()
    model_output = answers(sampler.sample(pending, logits, [0]))
    assert_same(model_output, alone(make_output(0, [1], [2, 3], grammar=ModuloGrammar(5)), logits[0]))


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (None, ErrorCode.INVALID, "it is poisoned"),
        (RuntimeError("secret"), ErrorCode.INTERNAL, "inside the service"),
        (BaseException("a panic"), ErrorCode.INTERNAL, "inside the service"),
    ],
)
def test_a_grammar_that_dies_ends_its_sequence_alone(
    failure: BaseException | None, code: ErrorCode, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="quire_engine.sampling.grammar_bitmask")
    wanted = {"poison": 7} | ({"failure": failure} if failure else {})
    params = SamplingParams(temperature=0, structured=choice(["a"]))
    bad = make_output(0, [1], [2], params=params, grammar=ModuloGrammar(5, **wanted))
    good = make_output(1, [1], [2], grammar=ModuloGrammar(5))
    sampler, logits = KeepingSampler(VOCAB), some_logits(2, VOCAB)
    first = run_step(sampler, [bad, good], logits)
    bad.token_ids.append(7)
    made = run_step(sampler, [bad, good], logits)
    assert not first.errors
    assert set(made.errors) == {0}
    assert (made.errors[0].code, made.errors[0].param) == (code, "choice" if code is ErrorCode.INVALID else None)
    assert message in made.errors[0].message
    assert "secret" not in made.errors[0].message
    assert made.token_ids == {1: first.token_ids[1]}
    assert set(run_step(sampler, [bad], logits[:1]).errors) == {0}, "it came back to life"


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({"grammar": ModuloGrammar(1)}, "response_format"),
        ({"bad_words": tuple((token_id,) for token_id in range(VOCAB))}, "bad_words"),
        ({"min_tokens": 2, "stop_token_ids": frozenset(range(VOCAB))}, "min_tokens"),
        ({"bad_words": tuple((t,) for t in range(1, VOCAB, 2)), "grammar": ModuloGrammar(2)}, "response_format"),
    ],
)
@pytest.mark.parametrize("num_candidates", [0, 4])
def test_a_sequence_that_no_token_is_left_for_ends_alone(
    wanted: dict[str, object], param: str, num_candidates: int
) -> None:
    batch = [
        make_output(0, [1], temperature=1, num_candidates=num_candidates, logprobs=1, **wanted),
        make_output(1, [1], temperature=1, bad_words=((3,),)),
    ]
    made = run_step(KeepingSampler(VOCAB), batch, some_logits(2, VOCAB))
    assert set(made.errors) == {0}
    assert (made.errors[0].code, made.errors[0].param) == (ErrorCode.INVALID, param)
    assert set(made.token_ids) == {1}
    assert not made.candidates
    assert not made.logprobs


# Numbers that are not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("row", range(5))
def test_a_row_that_is_not_finite_ends_its_sequences_alone(bad: float, row: int) -> None:
    styles = [
        {},
        {"temperature": 1.0, "logprobs": 2},
        {"repetition_penalty": 1.3, "logprobs": 2},
        {"num_candidates": 3},
        {"grammar": ModuloGrammar(3)},
    ]
    batch = [make_output(id, [1, 2], seed=id, **styles[id % 5]) for id in range(10)]
    logits = some_logits(5, VOCAB)
    expected = run_step(KeepingSampler(VOCAB), batch, logits.repeat(2, 1))
    logits[row, 11] = bad
    sampler = KeepingSampler(VOCAB)
    made = answers(sampler.sample(sampler.prepare_outputs(batch), logits, [id % 5 for id in range(10)]))
    assert set(made.errors) == {row, row + 5}
    assert {error.code for error in made.errors.values()} == {ErrorCode.INTERNAL}
    for part in ("token_ids", "logprobs", "candidates"):
        whole = getattr(expected, part)
        assert getattr(made, part) == {id: one for id, one in whole.items() if id % 5 != row}


def test_wide_vocabularies_are_drawn_from_as_narrow_ones() -> None:
    """Over 100,000 tokens, where the filters look at the best 1,024 first."""
    vocab_size = 100_003
    logits = some_logits(3, vocab_size)
    wanted = {"logit_bias": ((100_002, 90.0),), "temperature": 1.0}
    batch = [
        make_output(0, some_tokens(50, vocab_size), top_p=0.5, **wanted),
        make_output(1, [1], grammar=ModuloGrammar(2, vocab_size), top_k=2000, **wanted),
        make_output(2, [1], bad_words=((100_002,),), min_p=0.9, **wanted),
    ]
    made = run_step(KeepingSampler(vocab_size), batch, logits)
    assert made.token_ids[0] == 100_002
    assert made.token_ids[1] % 2 == 1
    assert logits[2, made.token_ids[2]] > logits[2].max() + math.log(0.9) - 1e-5
