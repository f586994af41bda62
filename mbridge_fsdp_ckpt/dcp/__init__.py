"""The files of `torch.distributed.checkpoint`, which stock `fsdp_dtensor` is made of."""
