"""In bfloat16 two right engines may part where two tokens are nearly as probable. So tokens are compared until they
part, and there each engine's token must be among the other's five most probable ones.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from quire_proto.sampling import SamplingParams
from transformers import AutoModelForCausalLM

from tests.model.engine import Choice, load, run
from tests.model.models import OWN, SmallModels
from tests.support.kernels import PATHS, cpu_path

TOKENS = 32
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=5, ignore_eos=True)


@cache
def theirs(folder: Path, prompts: tuple[tuple[int, ...], ...]) -> list[list[tuple[int, set[int]]]]:
    """Of each token that transformers makes in bfloat16: the token, and the five most probable ones."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    made = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = output.sequences[0, len(prompt) :].tolist()
        top = [set(logits[0].topk(5).indices.tolist()) for logits in output.logits]
        made.append(list(zip(tokens, top, strict=True)))
    return made


def check_close(ours: Choice, their_steps: list[tuple[int, set[int]]]) -> None:
    for token, told, (their_token, their_top) in zip(ours.token_ids, ours.logprobs, their_steps, strict=True):
        if token != their_token:
            assert token in their_top
            assert their_token in {one for one, _ in told.top}
            return


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model_name", OWN)
def test_tokens_part_from_transformers_only_where_both_are_probable(
    small_models: SmallModels, model_name: str, path: str
) -> None:
    folder, prompts = small_models.folder(model_name), small_models.prompts[:6]
    with cpu_path(path):
        executor = load(folder, 200, 0, "bfloat16")
        made = run(executor, prompts, [PARAMS] * len(prompts))
        executor.close()
    for (choice,), their_steps in zip(made.choices, theirs(folder, tuple(map(tuple, prompts))), strict=True):
        check_close(choice, their_steps)
