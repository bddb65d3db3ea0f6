"""Processes that compute one model together: who they are, how bytes go from one to another, what is said of one lost."""
