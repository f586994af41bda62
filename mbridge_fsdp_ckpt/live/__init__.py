"""What a running job holds: its tensors, their places, its sizes."""
