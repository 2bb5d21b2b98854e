"""The rules that Quire's services must compute alike, beside the generated stubs in ``quire.v1``.

One module a rule: ``errors`` (what a client can be told), ``sampling`` (how a token is drawn), ``hashing`` (names of
KV blocks), ``telemetry`` (names of spans, attributes and metrics), ``tracing`` (how spans leave the process),
``convert`` (protobuf to and from these types). ``errors``, ``sampling`` and ``hashing`` import nothing but the
standard library.
"""

__version__ = "0.1.0"
