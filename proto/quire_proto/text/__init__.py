"""Text to tokens and back: tokenizers, chat templates, the incremental detokeniser, stop strings. Does no I/O after
loading.
"""
