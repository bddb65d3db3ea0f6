"""What made the bundled models, workloads and held-out files; nothing of it is needed to use forerun."""
