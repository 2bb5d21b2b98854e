"""Request state: the ``Journal`` protocol in ``base``, kept in ``memory`` or in ``redis``."""
