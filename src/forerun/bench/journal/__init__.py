"""A server's journal: what it shows, and what the same traffic would have taken with other drafts or none."""
