"""Training: the bundled language model and its draft, their evaluation, and cost-padded models."""
