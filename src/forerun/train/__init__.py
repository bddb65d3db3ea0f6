"""Training of drafters, their data and their evaluation."""
