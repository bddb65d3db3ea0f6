"""Many requests from a file: OpenAI's batch format in, its answers out, through a journal that outlives a kill."""
