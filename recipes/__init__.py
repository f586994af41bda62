"""Training runs of Megatron-Bridge that save in `fsdp_dtensor_safe`: `python -m recipes --list`."""
