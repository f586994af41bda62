"""How a checkpoint gets to its place, and how old ones go."""
