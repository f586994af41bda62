"""What CPU ranks cannot show: `python -m testing.gpu` on a machine with GPUs (docs/gpu.md)."""
