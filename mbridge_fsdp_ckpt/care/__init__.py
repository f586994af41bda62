"""What the tools do to checkpoints that are on disk."""
