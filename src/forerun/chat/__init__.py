"""What a chat model's answer consists of: thinking, text, and calls of tools, each family in a format of its own."""
