"""transformers as people use it: ``generate`` for one request after the other, or for static batches, or its own
continuous batching. The setting ``batching`` says which.

A static batch is as large as fits into the memory that the engine has for keys and values, if each row has the longest
prompt and output of all. Shorter prompts are padded on the left, and every row runs until the longest output of its
batch is made, which is what a static batch costs; only tokens that were asked for count.
"""

import os
from typing import Any

import lines  # type: ignore[import-not-found] # beside this script

PAGE = 64  # tokens


def main() -> None:
    """Serves until there are no more workloads."""
    answers, settings = lines.take_output(), lines.settings()
    os.environ["OMP_NUM_THREADS"] = str(settings["threads"])  # of the thread that batches continuously
    import torch
    import transformers

    torch.set_num_threads(settings["threads"])
    batching = settings["batching"]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=getattr(torch, settings["dtype"]), local_files_only=True
    )
    model = model.to(torch.device(settings["device"])).eval()
    model.generation_config.eos_token_id = None
    system = Continuous(model, settings) if batching == "continuous" else Static(model, settings)
    what = {"serial": "one by one", "static": "static batches", "continuous": "continuous batching"}[batching]
    try:
        lines.serve(answers, f"transformers {transformers.__version__}, {what}", system.run)
    finally:
        system.close()


class Static:
    """``generate`` for batches of requests, in their order."""

    def __init__(self, model: Any, settings: dict[str, Any]) -> None:
        self.model = model
        self.is_serial = settings["batching"] == "serial"
        self.kv_tokens = settings["kv_tokens"]
        self.most = settings["max_num_seqs"]

    def run(self, prompts: list[list[int]], outputs: list[int], n: int) -> tuple[int, int]:
        """Returns the tokens that were made for requests, and the token positions that were computed."""
        made = computed = 0
        size = self.batch_size(max(map(len, prompts)) + max(outputs), n)
        for start in range(0, len(prompts), size):
            batch, wanted = prompts[start : start + size], outputs[start : start + size]
            self.generate(batch, max(wanted), n)
            made += n * sum(wanted)
            computed += n * len(batch) * (max(map(len, batch)) + max(wanted) - 1)
        return made, computed

    def close(self) -> None:
        """Nothing is left running."""

    def batch_size(self, row_tokens: int, n: int) -> int:
        """Prompts of a batch: as many as fit, each with ``n`` rows."""
        return 1 if self.is_serial else max(1, min(self.most, self.kv_tokens // row_tokens) // n)

    def generate(self, prompts: list[list[int]], most: int, n: int) -> None:
        """``n`` outputs of ``most`` tokens for each prompt. Raises ``RuntimeError`` if it made others."""
        import torch

        device, longest = self.model.device, max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        lengths = {"max_new_tokens": most, "min_new_tokens": most, "pad_token_id": 0}
        with torch.inference_mode():
            made = self.model.generate(ids, attention_mask=mask, num_return_sequences=n, **lengths, **sampling(n))
        if made.shape != (n * len(prompts), longest + most):
            raise RuntimeError(f"generate made {tuple(made.shape)}")


class Continuous:
    """The manager of ``generate_batch``, which is kept from workload to workload."""

    def __init__(self, model: Any, settings: dict[str, Any]) -> None:
        self.model = model
        self.settings = settings
        self.manager: Any = None
        self.n = 0

    def run(self, prompts: list[list[int]], outputs: list[int], n: int) -> tuple[int, int]:
        """Returns the tokens that were made, and the token positions that were computed, of which none is padding."""
        if self.n != n:
            self.start(n)
        for prompt, size in zip(prompts, outputs, strict=True):
            self.manager.add_request(prompt, max_new_tokens=size, eos_token_id=-1)
        made = ended = 0
        while ended < n * len(prompts):
            result = self.manager.get_result(timeout=1)
            if result is not None and result.error is not None:
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                ended += 1
                made += len(result.generated_tokens)
            elif result is None and not self.manager.is_running():
                raise RuntimeError("continuous batching has ended")
        return made, lines.needed(prompts, outputs, n)

    def start(self, n: int) -> None:
        """Begins anew, for ``n`` outputs of each prompt."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self.close()
        generation = GenerationConfig(
            num_return_sequences=n, eos_token_id=-1, pad_token_id=0, max_new_tokens=1, **sampling(n)
        )
        batching = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=max(1, self.settings["kv_tokens"] // PAGE),
            max_batch_tokens=self.settings["max_num_batched_tokens"],
            allow_block_sharing=n > 1,
        )
        self.manager = self.model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
        if not self.manager.warmed_up:
            self.manager.warmup()
        self.manager.start()
        self.n = n

    def close(self) -> None:
        """Ends the manager's thread."""
        if self.manager is not None:
            self.manager.stop(block=True, timeout=5)


def sampling(n: int) -> dict[str, Any]:
    """Greedy for one output, and from the whole distribution for several."""
    return {"do_sample": True, "top_k": 0} if n > 1 else {"do_sample": False}


if __name__ == "__main__":
    main()
