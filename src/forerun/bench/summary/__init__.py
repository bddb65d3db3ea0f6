"""Reports of results from files: warnings, pictures, Markdown, and docs/benchmarks.md."""
