"""The journal of a server's traffic: how long, how fast and how predictable answers were, without any of their text."""
