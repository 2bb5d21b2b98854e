"""Grammars: what a request asks its output to look like, compiled by llguidance. Imports neither torch nor grpc.

``compiler`` is what the rest of the engine uses. Behind it, ``definition`` says each kind in the library's words,
``guidance`` compiles and matches, and ``trial`` is the process in which every grammar is tried out first.
"""
