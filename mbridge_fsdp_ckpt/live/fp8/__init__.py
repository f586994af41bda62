"""State of FP8 scaling."""
