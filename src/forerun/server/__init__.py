"""An OpenAI-compatible server: HTTP in, requests of one engine, answers and streams out."""
