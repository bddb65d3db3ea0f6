"""Other engines beside forerun: the same token ids, threads and numbers of tokens, each in a process of its own."""
