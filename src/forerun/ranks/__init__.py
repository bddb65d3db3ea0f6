"""Processes that compute one model together: who they are, how bytes go from one to another, and what is said
of one that is lost."""
