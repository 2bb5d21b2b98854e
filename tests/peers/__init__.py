"""Other servers' own HTTP suites, run against ``quire serve``, and lists of their parameters."""
