"""The command `mbridge_fsdp_ckpt`, also `python -m mbridge_fsdp_ckpt`."""
