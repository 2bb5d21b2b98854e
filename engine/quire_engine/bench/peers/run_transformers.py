"""transformers' ``generate`` with one static batch of all prompts. Shorter prompts are padded on the left, and every
row runs until the longest output is made, which is what a static batch costs; only tokens that were asked for count.
"""

import lines  # type: ignore[import-not-found] # beside this script


def main() -> None:
    """Serves until there are no more workloads."""
    answers, settings = lines.take_output(), lines.settings()
    import torch
    import transformers

    torch.set_num_threads(settings["threads"])
    device = torch.device(settings["device"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=getattr(torch, settings["dtype"]), local_files_only=True
    )
    model = model.to(device).eval()
    model.generation_config.eos_token_id = None

    def run(prompts: list[list[int]], outputs: list[int]) -> int:
        longest, most = max(map(len, prompts)), max(outputs)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        with torch.inference_mode():
            made = model.generate(
                ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False, pad_token_id=0
            )
        return sum(outputs) if made.shape == (len(prompts), longest + most) else 0

    lines.serve(answers, f"transformers {transformers.__version__}, one static batch", run)


if __name__ == "__main__":
    main()
