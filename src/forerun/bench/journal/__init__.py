"""A server's journal as results."""
