"""Tool calls in a model's output: the formats that models write them in, read piece by piece, and grammars that make a
model write them. Does no I/O.
"""
