"""Training of Medusa heads."""
