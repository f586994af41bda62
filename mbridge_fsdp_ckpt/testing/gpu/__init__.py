"""What CPU ranks cannot show: `python -m mbridge_fsdp_ckpt.testing.gpu` on a machine with GPUs (docs/gpu.md)."""
