"""Scripts that run a peer. Each is run by the interpreter in whose environment the peer is installed, which need not be
ours: they import nothing of this package, and are never imported by it.
"""
