"""Training runs of Megatron-Bridge that save in `fsdp_dtensor_safe`: `python -m mbridge_fsdp_ckpt.recipes --list`."""
