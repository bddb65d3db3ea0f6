"""OpenAI's format: bodies of requests to prompts and options, results to bodies of responses, exceptions to errors."""
