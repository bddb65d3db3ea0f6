"""A certificate of losslessness on a user's own model: what was compared, what was found, what would have been."""
