"""The command ``quire``, for people who use Quire. It needs neither the engine nor the router, nor torch.

Packages: ``bench`` (``quire bench serve``, which measures any OpenAI-compatible server).
"""
