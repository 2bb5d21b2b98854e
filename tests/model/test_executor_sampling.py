"""What the executor returns for draws and targets, against transformers' logits for the same tokens."""

import threading
from array import array
from collections.abc import Sequence

import pytest
import torch
from quire_engine.attention.base import AttentionBatch
from quire_engine.core.step import ModelOutput
from quire_engine.executor.torch_executor import TorchExecutor
from quire_proto.errors import ErrorCode
from quire_proto.sampling import TokenLogprobs

from tests.model.models import VOCAB_SIZE, SmallModels, oracle_model
from tests.support.executors import load_executor
from tests.support.sampling_inputs import ModuloGrammar, ModuloMatcher, Output, make_output
from tests.support.steps import KnownChunk, execute, make_step

POOL = 4 << 20
BLOCKS = [5, 3, 9, 2]


@pytest.fixture
def executor(small_models: SmallModels) -> TorchExecutor:
    return load_executor(small_models.folder("llama3"), kv_cache_memory=POOL, swap_bytes=0)


@torch.inference_mode()
def oracle_logprobs(small_models: SmallModels, tokens: Sequence[int]) -> torch.Tensor:
    model = oracle_model(small_models.folder("llama3"))
    return model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)


def whole(tokens: Sequence[int], outputs: Sequence[Output], id: int = 0, **more: object) -> KnownChunk:
    return KnownChunk(id, list(tokens), 0, BLOCKS, tuple(output.request for output in outputs), **more)


# Several draws from one prompt


def test_all_draws_of_a_chunk_are_made_from_its_last_logits(executor: TorchExecutor, small_models: SmallModels) -> None:
    tokens = small_models.prompts[4]
    styles = [{"temperature": 2.0, "top_k": 40}, {"temperature": 2.0, "repetition_penalty": 1.2}, {"temperature": 0}]
    outputs = [make_output(id, tokens, seed=id, **styles[id % 3]) for id in range(12)]
    apart = [executor.execute_model(make_step(0, [whole(tokens, [each])])).token_ids[0] for each in outputs]
    other = whole(small_models.prompts[5], [], 10)
    together = executor.execute_model(make_step(1, [other, whole(tokens, outputs, 11)]))
    assert together.token_ids == apart
    assert len(set(apart)) > 3


def test_chunks_with_none_one_and_many_draws_share_a_step(executor: TorchExecutor) -> None:
    prompts = [[3, 4, 5], [6, 7], [8], [9, 10, 11, 12]]
    counts, chunks = (2, 0, 1, 3), []
    for index, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        outputs = [make_output(place, prompt, seed=place, temperature=1.5) for place in range(count)]
        chunks.append(KnownChunk(index, prompt, 0, [index + 1], tuple(each.request for each in outputs)))
    apart = ModelOutput()
    for number, one in enumerate(chunks):
        apart.add(executor.execute_model(make_step(0, [one])), number)
    assert executor.execute_model(make_step(1, chunks)).token_ids == apart.token_ids
    assert len(apart.token_ids) == 6


# Log-probabilities


def test_output_logprobs_are_those_of_transformers(executor: TorchExecutor, small_models: SmallModels) -> None:
    tokens = small_models.prompts[6]
    output = make_output(0, tokens, seed=3, temperature=2.0, logprobs=5, presence_penalty=1.0)
    made = executor.execute_model(make_step(0, [whole(tokens, [output])]))
    expected = oracle_logprobs(small_models, tokens)[-1]
    assert made.logprobs[0].logprob == pytest.approx(expected[made.token_ids[0]].item(), abs=1e-4)
    assert [token_id for token_id, _ in made.logprobs[0].top] == expected.topk(5).indices.tolist()
    assert [logprob for _, logprob in made.logprobs[0].top] == pytest.approx(expected.topk(5).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("size", [1, 7, 16, 64])
def test_prompt_logprobs_are_those_of_transformers_however_the_prompt_is_cut(
    executor: TorchExecutor, small_models: SmallModels, size: int
) -> None:
    tokens, other = small_models.prompts[5], small_models.prompts[3]
    made: list[TokenLogprobs] = []
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        ends = start + size >= len(tokens)
        beside = KnownChunk(
            *(9, other[:20], 0, [11, 12], (make_output(9, other[:4]).request,)), num_prompt_logprobs=0, num_draws=0
        )
        mine = KnownChunk(
            *(1, part, start, BLOCKS, (make_output(1, tokens).request,)),
            num_prompt_logprobs=3,
            known=tokens,
            num_draws=int(ends),
        )
        model_output = execute(executor, make_step(start, [beside, mine]))
        made += model_output.prompt_logprobs.get(1, [])
        assert len(model_output.prompt_logprobs[9]) == 3
        assert set(model_output.token_ids) == ({1} if ends else set())
    expected = oracle_logprobs(small_models, tokens)
    assert len(made) == len(tokens) - 1
    for place, one in enumerate(made):
        assert one.logprob == pytest.approx(expected[place, tokens[place + 1]].item(), abs=1e-4)
        assert [token_id for token_id, _ in one.top] == expected[place].topk(3).indices.tolist()


# Beams


def test_candidates_are_the_most_probable_of_transformers(executor: TorchExecutor, small_models: SmallModels) -> None:
    tokens = small_models.prompts[7]
    made = executor.execute_model(make_step(0, [whole(tokens, [make_output(0, tokens, num_candidates=8)])])).candidates[
        0
    ]
    expected = oracle_logprobs(small_models, tokens)[-1].topk(8)
    assert made.token_ids == expected.indices.tolist()
    assert made.logprobs == pytest.approx(expected.values.tolist(), abs=1e-4)


# Grammars


def test_masks_are_filled_while_the_model_computes(executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    computing, filled = threading.Event(), threading.Event()

    class Waiting(ModuloMatcher):
        def fill_bitmask(self, mask: memoryview) -> None:
            assert computing.wait(timeout=30)
            super().fill_bitmask(mask)
            filled.set()

    class Grammar(ModuloGrammar):
        def new_matcher(self) -> ModuloMatcher:
            return Waiting(self)

    prepare = executor._worker.runner._attention.prepare

    def watched(*batches: AttentionBatch) -> None:
        computing.set()
        assert filled.wait(timeout=30)
        prepare(*batches)

    monkeypatch.setattr(executor._worker.runner._attention, "prepare", watched)
    output = make_output(0, [5, 6], grammar=Grammar(2, VOCAB_SIZE))
    assert executor.execute_model(make_step(0, [whole([5, 6], [output])])).token_ids[0] % 2 == 1


def test_a_step_that_failed_is_run_again_with_its_grammars(executor: TorchExecutor) -> None:
    grammar = ModuloGrammar(7, VOCAB_SIZE)
    held = make_output(0, [5, 6], [9], grammar=grammar).request
    broken = make_output(1, [999], grammar=grammar).request
    good, bad = KnownChunk(0, [5, 6, 9], 0, [1], (held,)), KnownChunk(1, [999], 0, [2], (broken,))
    with pytest.raises(IndexError):
        executor.execute_model(make_step(0, [good, bad]))
    first = executor.execute_model(make_step(0, [good])).token_ids[0]
    assert grammar.allows([9], first)
    known = [5, 6, 9, first]
    following = KnownChunk(0, [first], 3, [1], (held,), known=known)
    with pytest.raises(IndexError):
        executor.execute_model(make_step(1, [following, bad]))
    second = executor.execute_model(make_step(1, [following])).token_ids[0]
    anew = make_output(2, known[:2], known[2:], grammar=grammar).request
    assert executor.execute_model(make_step(2, [KnownChunk(2, known, 0, [3], (anew,))])).token_ids[0] == second


def test_what_is_kept_of_a_row_is_dropped_when_it_is_freed(executor: TorchExecutor) -> None:
    requests = [make_output(id, [5], frequency_penalty=1.0).request for id in range(3)]
    executor.execute_model(
        make_step(0, [KnownChunk(id, [5], 0, [id + 1], (request,)) for id, request in enumerate(requests)])
    )
    kept = executor._worker.states._sampling_states
    assert len(kept) == 3
    executor.execute_model(make_step(1, freed_rows=array("i", [0, 2])))
    assert len(kept) == 1


def test_a_grammar_without_a_way_out_ends_its_sequence_and_no_other(executor: TorchExecutor) -> None:
    stuck, free = make_output(0, [5], grammar=ModuloGrammar(1, VOCAB_SIZE)).request, make_output(1, [5]).request
    made = execute(executor, make_step(0, [KnownChunk(0, [5], 0, [1], (stuck,)), KnownChunk(1, [5], 0, [2], (free,))]))
    assert made.errors[0].code is ErrorCode.INVALID
    assert set(made.token_ids) == {1}
