"""Fixtures for all tests."""

pytest_plugins = ["mbridge_fsdp_ckpt.testing.pytest_plugin"]
