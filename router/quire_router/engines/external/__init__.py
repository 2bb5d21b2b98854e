"""Engines that others have written, as clients of the same protocol: servers of vLLM, SGLang, and the OpenAI API."""
