"""A model by what a user types: a name of the Hugging Face Hub, an address in object storage or a registry, a folder or
a GGUF file.

``find_model`` (``find``) turns it into a local folder or file and the name to serve it under. ``name`` reads what was
typed, ``fetch`` and ``gguf`` download from the Hub (``hub``) or from elsewhere (``s3`` and ``oci``, into ``copies``),
and ``check`` refuses, before anything large is downloaded, what cannot be served or does not fit.
"""
