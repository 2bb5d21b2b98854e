"""Settings of the whole test run."""

import os

# The models here are tiny: more threads would only wait for each other, and the engines that tests start inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
