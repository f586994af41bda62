"""What a save of a job would write, without weights, GPUs or ranks: planned over tensors without memory."""
