"""How the rows of one forward lie in it, and what they may see, in arrays."""
