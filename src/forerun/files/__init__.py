"""Files that somebody else may have written, and files that are never left half written."""
