# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Run CUDA-only Megatron code on CPU ranks.

`cpu_cuda` sends CUDA to the CPU, `kernels` stands in for kernels that exist for CUDA alone, `ranks` runs cases on
many ranks and shows what failed or hung, `collectives` counts them, and `pytest_plugin` has fixtures for all that.
"""
