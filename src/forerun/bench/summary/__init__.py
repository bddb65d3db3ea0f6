"""Reports of results from files: warnings, pictures, a page, Markdown, CSV, and docs/benchmarks.md."""
