"""Training of EAGLE heads."""
