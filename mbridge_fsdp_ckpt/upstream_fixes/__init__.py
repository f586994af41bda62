"""Corrections of Megatron-Core and Megatron-Bridge, one file and one upstream issue each."""
