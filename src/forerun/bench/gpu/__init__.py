"""What a GPU can do, and what forerun makes of it: section after section, each for itself."""
