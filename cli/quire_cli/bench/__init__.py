"""``quire bench serve``: measures any OpenAI-compatible server over HTTP, with the words, the flags and the result
keys of ``vllm bench serve``.

In the order of a run: ``config`` reads the flags, ``dataset`` makes the requests, ``load`` sends them at their times
through ``client``, ``stream`` reads what came back, ``metrics`` computes the figures, ``report`` prints and draws them.
"""
