"""What every test stands on: no network, nothing in the user's cache folder, a tokenizer that keeps to its thread."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("FORERUN_COST_CACHE", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
