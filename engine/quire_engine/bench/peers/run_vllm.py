"""vLLM's offline engine, prefix cache off, as the model's owner would run it: compiled, its own defaults otherwise."""

import os

import lines  # type: ignore[import-not-found] # beside this script

KV_GIB = 2


def main() -> None:
    """Serves until there are no more workloads."""
    answers, settings = lines.take_output(), lines.settings()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if settings["device"] == "cpu":
        cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(KV_GIB))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    import vllm  # type: ignore[import-not-found]

    engine = vllm.LLM(
        settings["model"],
        skip_tokenizer_init=True,
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        enable_prefix_caching=False,
        tensor_parallel_size=settings["tensor_parallel_size"],
        pipeline_parallel_size=settings["pipeline_parallel_size"],
    )

    def run(prompts: list[list[int]], outputs: list[int], n: int) -> tuple[int, int]:
        sampling = [
            vllm.SamplingParams(n=n, temperature=float(n > 1), ignore_eos=True, max_tokens=size, detokenize=False)
            for size in outputs
        ]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = engine.generate(given, sampling, use_tqdm=False)
        made = sum(len(output.token_ids) for each in done for output in each.outputs)
        return made, lines.needed(prompts, outputs, n)

    lines.serve(answers, f"vllm {vllm.__version__}", run)


if __name__ == "__main__":
    main()
