"""Settings of the whole test run."""

import os

from hypothesis import settings

# The models here are tiny: more threads would only wait for each other, and the engines that tests start inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine may take as long as it likes.
# A run that decides whether a change lands does not depend on luck: there, examples are the same each time.
settings.register_profile("quire", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("quire")
