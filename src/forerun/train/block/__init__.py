"""Training of heads that draft a block in one pass."""
