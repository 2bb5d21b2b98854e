"""What Quire's services share, beside the generated stubs in ``quire.v1``.

``errors`` (the errors that clients see), ``sampling`` (sampling parameters and their ranges), ``structured_output``
(grammars of outputs), ``hashing`` (hashes of KV blocks), ``convert`` (protobuf to and from these types), ``telemetry``
(names of spans, attributes and metrics), ``tracing`` (export of spans), ``text`` (tokenizers, chat templates and
parsers of outputs), ``cli`` (settings and flags), ``tls`` and ``certificates``, ``supervise`` (tasks that are
restarted). ``errors``, ``sampling`` and ``hashing`` need nothing but the standard library.
"""

__version__ = "0.1.0"
