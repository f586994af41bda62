"""Importing the package is quick and pulls in neither torch nor a framework."""

import subprocess
import sys


def test_import_loads_no_framework() -> None:
    heavy = ("torch", "numpy", "megatron", "transformer_engine", "verl", "omegaconf")
    program = f"import sys, mbridge_fsdp_ckpt; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_names_are_found_where_they_live() -> None:
    import mbridge_fsdp_ckpt
    from mbridge_fsdp_ckpt.checkpoint import save

    assert mbridge_fsdp_ckpt.save is save
    assert set(mbridge_fsdp_ckpt.__all__) >= {"save", "load", "register", "unregister", "Settings"}
