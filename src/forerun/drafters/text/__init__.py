"""Drafters that copy from text: the request's, its tenant's, a corpus's, the client's guess."""
