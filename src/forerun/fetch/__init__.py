"""Models that forerun fetches from the Python package index, and what of them is there."""
