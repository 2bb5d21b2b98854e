"""What carries out a step plan: the ``Executor`` protocol in ``base``, and one module for each way to do it."""
