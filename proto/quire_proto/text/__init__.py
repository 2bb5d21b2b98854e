"""Text in and out: tokenizers, chat templates, detokenising, stop strings, reasoning and tool calls."""
