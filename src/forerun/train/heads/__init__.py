"""What the training of all kinds of heads shares."""
