"""What every test stands on: no network, nothing in the user's cache folder, a tokenizer and a torch of one thread.

One thread, so that pytest-xdist can put a worker on every core; what depends on the number of threads runs again with
two, in `integration/test_two_threads.py`. OMP_NUM_THREADS in the environment overrides it.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("FORERUN_COST_CACHE", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Read once, when torch and NumPy are imported; the processes that tests start inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
for _name in ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(_name, os.environ["OMP_NUM_THREADS"])
