"""Several drafters for one sequence."""
