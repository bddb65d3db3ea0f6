"""What made the bundled models, workloads and held-out files, and what checks wheels: nothing that using forerun needs."""
