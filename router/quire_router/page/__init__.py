"""The page at ``/``: static files, without a build step. ``quire_router.api.rest.page`` serves them."""
