# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""An asynchronous save: the training process copies its state into shared memory, a checkpoint process writes it.

    training process    observe | plan and copy, during the next forward and backward pass | the optimizer's step waits
    checkpoint process            agree | hash, write, flush | meet | commit

Both are the steps of `saving.run`, with the same meetings, files and errors.  The checkpoint process has no CUDA, no
Megatron and nothing of the training process's interpreter.  It lives as long as its training process, and meets those
of the other ranks in the job's rendezvous store.
"""
