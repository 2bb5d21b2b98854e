"""Models: their configuration, their weights, and the code that runs them. Knows tokens and tensors, never
requests.
"""
