"""A server that knows only text: what is sent there, and what becomes of its text."""

import pytest
from quire_proto.errors import ErrorCode
from quire_proto.sampling import FinishReason, SamplingParams
from quire_proto.structured_output import choice
from quire_proto.text.tokenizer import ModelTokenizer
from quire_router.engines.attempt import EngineLost
from quire_router.engines.external.http_client import BadAnswer, HttpClient
from quire_router.engines.external.openai_server import OpenAIServer
from quire_router.engines.settings import KnownModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.http_engines import DEMO, OpenAIEngine, serving
from tests.support.vllm_contract import PROMPT, choice_of

TOKENIZER = ModelTokenizer.load(DEMO)


async def connected(tokenizer: ModelTokenizer = TOKENIZER) -> OpenAIServer:
    """A server that has been asked what it is."""
    engine, server = OpenAIEngine(), OpenAIServer()
    async with serving(engine):
        http = HttpClient(engine.url)
        try:
            assert (await server.describe(http, {"m": KnownModel(tokenizer)})).max_model_len == 0
        finally:
            await http.close()
    return server


def spaced() -> ModelTokenizer:
    """One that puts a space before every text, as SentencePiece's do."""
    words = {"▁": 0, "H": 1, "e": 2}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="H"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return ModelTokenizer(tokenizer, None)


async def test_the_prompt_and_what_was_delivered_are_sent_as_text() -> None:
    body = (await connected()).body(choice_of(SamplingParams(max_tokens=5)))
    assert body["prompt"] == TOKENIZER.decode(PROMPT)
    assert body["max_tokens"] == 4


async def test_text_becomes_tokens_of_the_same_text() -> None:
    reader = (await connected()).reader(choice_of(SamplingParams(max_tokens=100)))
    pieces = ["Once up", "on a ti", "me é", "中\n"]
    tokens, position = [], 1
    for piece in pieces:
        output = reader.read({"choices": [{"text": piece, "finish_reason": None}]})
        assert output is not None
        assert output.position == position
        position += len(output.token_ids)
        tokens += output.token_ids
    assert TOKENIZER.decode(tokens) == "".join(pieces)
    end = reader.read({"choices": [{"text": "", "finish_reason": "stop"}]})
    assert end is not None
    assert end.finish_reason is FinishReason.STOP


async def test_an_answer_ends_at_the_routers_own_count() -> None:
    reader = (await connected()).reader(choice_of(SamplingParams(max_tokens=3)))
    output = reader.read({"choices": [{"text": "Once upon a time there was", "finish_reason": None}]})
    assert output is not None
    assert (len(output.token_ids), output.finish_reason) == (2, FinishReason.LENGTH)


async def test_what_neither_text_nor_an_end_has_is_no_output() -> None:
    reader = (await connected()).reader(choice_of(SamplingParams()))
    assert reader.read({"choices": [{"text": "", "finish_reason": None}]}) is None
    assert reader.read({"choices": [], "usage": {}}) is None
    with pytest.raises(EngineLost):
        reader.read({"choices": [{"text": "", "finish_reason": "content_filter"}]})
    with pytest.raises(BadAnswer):
        reader.read({"choices": 3})


async def test_a_tokenizer_whose_pieces_do_not_join_is_not_used() -> None:
    with pytest.raises(BadAnswer, match="piece by piece"):
        await connected(spaced())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=3),
        SamplingParams(min_p=0.5),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(stop_token_ids=(3,)),
        SamplingParams(ignore_eos=True),
        SamplingParams(min_tokens=1),
        SamplingParams(logprobs=0),
        SamplingParams(best_of=2),
        SamplingParams(beam_width=2),
        SamplingParams(structured=choice(["a"])),
    ],
)
def test_what_the_api_has_no_field_for_is_refused(params: SamplingParams) -> None:
    error = OpenAIServer().unsupported(params, resumed=False)
    assert error is not None
    assert error.code is ErrorCode.INVALID
    assert OpenAIServer().unsupported(SamplingParams(seed=3, top_p=0.5), resumed=False) is None
