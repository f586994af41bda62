"""What looks after checkpoints on disk, and the command."""
