"""What made the bundled models, workloads and held-out files, what checks wheels: using forerun needs nothing of it."""
