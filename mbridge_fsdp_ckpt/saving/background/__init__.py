"""A save beside the training: the trainer copies what it saves into shared memory, a process of its own writes it.

    trainer    look | plan and copy, during the next forward and backward pass | the optimizer's step waits for the rest
    writer           agree | hash, write, flush | meet | commit

Both are the steps of `saving.run`, with the same meetings, files and errors.  The writer has no CUDA, no Megatron and
nothing of the trainer's interpreter.  It lives as long as its trainer, and meets the writers of the other ranks in
the job's rendezvous store.
"""
