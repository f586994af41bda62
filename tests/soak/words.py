# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The matrices in words, for docs/soak.md: what is attacked, and why what may be accepted is harmless."""

from __future__ import annotations

MATRICES = {
    "damage": (
        "Damaged files",
        "One file of a good checkpoint is damaged, then two ranks load it. A case passes if all ranks raise the same "
        "named error and neither model nor optimizer has changed.",
    ),
    "hostile": (
        "Forged checkpoints",
        "Somebody makes a checkpoint to do harm, with every checksum right, and a process opens and reads all of it. "
        "A case passes if no code of theirs runs, no file outside is opened, memory and time stay in their limits, and "
        "the reader ends with a named error. What is accepted is listed with the reason why it is harmless.",
    ),
    "disk": (
        "Failing storage",
        "One call of one rank's storage fails during a save: each kind of call, on each rank. A case passes if all "
        "ranks raise the same error, the last checkpoint is still there and whole, and the next save leaves nothing of "
        "the failed one.",
    ),
    "disk_beside": (
        "Failing storage in asynchronous saves",
        "The same while the ranks train: it is the storage of one rank's writer that fails, each call with one of the "
        "errors in turn. A case passes if the next save, or the end, raises the same error on all ranks; if the ranks "
        "trained on as if nothing were saved; and if the last checkpoint is whole, as above.",
    ),
    "slow": (
        "Slow storage",
        "One call of one rank's storage takes 2.5 times the time limit. A case passes if nobody notices.",
    ),
    "slow_beside": (
        "Slow storage in asynchronous saves",
        "The same while the ranks train: one call of the storage of one rank's writer takes 2.5 times the time limit, "
        "or the copying of one block by its trainer. A case passes if nobody notices, and what was live when the save "
        "began is on disk.",
    ),
    "kill_steps": (
        "Killed at each step",
        "One of two ranks is killed just before and just after each step of a save, into a new directory and over an "
        "older checkpoint, on file systems with and without an exchange of directories. A case passes if a resume "
        "finds the older or the newer checkpoint, bit for bit.",
    ),
    "kill_moments": (
        "Killed at any moment",
        "The same, at a random moment.",
    ),
    "kill_beside": (
        "Killed in asynchronous saves",
        "A save goes on in a process of its own, the *writer*, while its rank, the *trainer*, trains. The writer of "
        "one of two ranks, its trainer, or both are killed just before each step that the writer takes. A case passes "
        "if all who live see the same, a named error or a save that went well; if nobody waits without limit; and if a "
        "resume finds the older or the newer checkpoint, bit for bit: the newer one if any rank reported that it is "
        "there.",
    ),
    "deletions": (
        "Deletions",
        "Two runs lie side by side whose names match each other as patterns (`run[1]` and `run1`, `a*b`, `q?`), on a "
        "file system, on an S3 server and in memory, with trackers of every kind, links, readers, checkpoints that "
        "lack a file, leftovers of saves that died and files of somebody's. Whatever deletes is run: `prune`, "
        "`repair`, retention after a save, the removal of one checkpoint in the background, a save that overwrites, "
        "one that fails, a conversion that is interrupted; in between the run goes back, a reader comes, a tracker "
        "becomes illegible, or a save commits. A case passes if exactly what the rules name is gone, computed from the "
        "description of the case apart from the package, and if every other file of both runs is there, byte for byte. "
        "`make test` makes the same draws each time.",
    ),
    "signals": (
        "Signals and forks",
        "A background save of two plain ranks, and then the next. At a step of the training process or of its "
        "checkpoint process, every process of the job gets SIGTERM, SIGUSR1 or SIGINT, as a scheduler sends them; or "
        "one process is stopped for half the time limit, or twice; or a data loader forks a worker. The training "
        "process of rank 0 serves the rendezvous store. A case passes if both saves are whole, nothing is raised and "
        "every checkpoint process lives; after twice the limit, if one of them is.",
    ),
    "optimizers": (
        "Loads of every optimizer",
        "A checkpoint of one job is loaded by another, in which something is otherwise: torch's AdamW, with and "
        "without amsgrad, SGD with momentum, an optimizer of somebody's own, Transformer Engine's FusedAdam with "
        "moments in fp32, bf16 and fp16 or with fp32 copies of bf16 weights, and Megatron's HybridDeviceOptimizer. "
        "Memory that nothing has written is NaN. A case passes if every element of weights, optimizer state, copies of "
        "weights and numbers of param groups is what an oracle apart from the package says, and three steps equal "
        "those of the job that saved, or of one that the oracle has set by hand; or if all ranks raise the same named "
        "error, where the load may be refused, and nothing has changed.",
    ),
    "progress": (
        "Checkpoints of another loop",
        "Bridge's, Megatron-LM's and VeRL's own loops each save the same model, by stock and by this package, and each "
        "loads what the others saved. Batches grow, and one is skipped, so that nothing follows from the iteration. A "
        "case passes if the loop goes on from the iteration, the samples, the operations, the place in the schedule "
        "and the random-number state at which the other stood; or if it is refused by an error that names what to "
        "set, and does as set.",
    ),
    "plans": (
        "Damaged plans",
        "Random plans of random jobs are damaged, and elements are counted. A case passes if what the first meeting "
        "lets through still writes every element exactly once. Some jobs are wrong before any damage: nobody writes a "
        "tensor that only some ranks hold.",
    ),
    "imports": (
        "Imports of changed models",
        "One tensor of a Hugging Face model is removed, added, reshaped, cast, or given values that are no numbers or "
        "too large; then the model is imported, once for each family, tensor and change. A case passes if the import "
        "is refused with that tensor's name, or the weights are those of the unchanged model; where a tensor is "
        "doubled, if its elements alone are doubled.",
    ),
}
"""By file name, in the order of the page: a title, and what was done."""

ATTACKED = {
    "bit flipped": "one bit of a file flipped",
    "bytes appended": "bytes appended to a file",
    "manifest edited": "one value of the manifest edited, the checksum left",
    "missing": "a file deleted",
    "of another save": "a file replaced by that of another save",
    "swapped": "two files swapped",
    "index edited": "one number of an index file edited, the checksums left",
    "truncated": "a file cut short",
    "JSON": "JSON: duplicate fields, NaN, huge numbers, deep nesting, a gigabyte of text",
    "boxes and shapes": "boxes that lie outside, overlap, or overflow; absurd shapes",
    "claims of a pickle": "stock pickles that announce gigabytes",
    "code in .metadata": "calls of functions in stock's `.metadata`",
    "code in records": "pickled calls in a record, in `.metadata` beside a manifest, in place of a manifest",
    "code in stock records": "calls of functions in stock's tensors and values",
    "dtypes": "names that are no dtype, and every dtype that torch has",
    "file names": "file names that lead out of the directory",
    "links and special files": "links, pipes and folders in place of files",
    "numbers in index files": "every number of every array of an index file as another",
    "counts in index files": "index files whose counts, or whose beginning, lie",
    "contradictions in index files": "index files that contradict themselves, each other, or the manifest",
    "values of numbers": "wrong bytes for a number that stands in an index file",
    "index files that grow": "index files with fifty thousand rows or names too many, or a gigabyte long",
    "pickles that grow": "stock pickles of a few bytes that grow without end",
    "stock file names": "stock file names that lead out of the directory",
    "stock files": "links, pipes and folders in place of stock's files",
    "stock metadata": "stock metadata with values of wrong types and sizes",
    "structure": "index files and ranks twice or absent; another version",
    "tracker": "a tracker file that leads elsewhere, or is huge",
    "typed values": "typed values whose shape, size or encoding lies",
    "types, header": "a value of another type in each field of an index file's header",
    "types, manifest": "a value of another type in each field of the manifest",
    "types, record": "a value of another type in each field of a rank's own record",
    "untouched": "nothing, as a check of the checks",
    "EDQUOT": "quota exceeded (EDQUOT)",
    "EIO": "input/output error (EIO)",
    "ENOSPC": "no space left (ENOSPC)",
    "EROFS": "read-only file system (EROFS)",
}
"""Kinds of cases."""

_SIGNED = (
    "who can sign can write another checkpoint, or leave out what is to be loaded; what contradicts another of the "
    "files is found by `verify`"
)

HARMLESS = {
    "JSON": "fields that readers do not know are ignored; an infinite number and deep lists are data that a "
    "value may hold; what is large is bounded by the file's own size",
    "file names": "no suffix is the suffix on a file system",
    "boxes and shapes": "a tensor without elements needs no chunk",
    "code in records": "elements are read as raw bytes, and `.metadata` is not read where there is a manifest",
    "dtypes": "a dtype that torch has, with elements as long as recorded, is a dtype",
    "stock metadata": "what is no tensor, or no value, is not read: a load then misses its key",
    "structure": "a newer minor version may add fields; counts of chunks and slots tell how much there is to do, and "
    "lead nowhere; " + _SIGNED,
    "numbers in index files": _SIGNED,
    "contradictions in index files": _SIGNED,
    "index files that grow": "no more is read than the file has, and what was saved is loaded; " + _SIGNED,
    "values of numbers": _SIGNED,
    "typed values": "as many bytes as recorded, and nothing that a load compares",
    "types, record": "any value is a rank's own",
    "types, header": "the other value is of the field's type: text for text, a list for a list",
    "types, manifest": "the other value is of the field's type: text for text, a list for a list; " + _SIGNED,
    "untouched": "a good checkpoint is to be accepted",
}
"""Kinds of hostile cases of which some are accepted: why."""

COUNTED = "every element was counted, and is still written once"
"""Why a damaged plan may pass."""

SCENARIOS = {
    "fresh save": "a save into a new directory",
    "overwriting save": "a save over an older checkpoint",
    "overwriting save without exchange": "the same, where two directories cannot be exchanged",
    "overwriting save by marker": "the same, where the manifest is the marker",
    "fresh save beside": "an asynchronous save into a new directory",
    "overwriting save beside": "an asynchronous save over an older checkpoint",
    "load": "a load",
    "load on one host": "a load by ranks of one host, of which one reads for both",
}
"""What storage was slow in."""

STEPS = {
    "plan_save": "planning",
    "Coordination.meet": "a meeting",
    "PlanComparison.decide": "rank 0 compares the plans",
    "condemn_leftovers": "leftovers are renamed",
    "begin": "the staging directory is made",
    "write": "writing all chunks and the index file",
    "PayloadWriter.add_pieces": "writing one chunk",
    "PayloadWriter.close": "closing the payload file",
    "write_file": "writing an index file, or the metadata",
    "os.fsync": "flushing a file",
    "CommitRound.decide": "rank 0 checks and commits",
    "write_dcp_view": "writing DCP metadata",
    "Coordination.fence": "the fence before the rename",
    "put_in_place": "putting the checkpoint in its place",
    "sync_directory": "flushing a directory",
    "_exchange": "exchanging two directories",
    "Path.rename": "a rename",
    "Path.replace": "replacing the tracker, or `.metadata`",
    "shutil.rmtree": "deleting what is not needed any more",
    "Coordination.end": "the last word",
    "Job.clean_up": "tidying up",
    "Writer._begin": "the writer hears of a save",
    "Arriving._pieces": "the writer takes a block from the staging memory",
    "Writer._ask": "the writer asks its trainer for something: to add files, to replace the tracker",
    "Channel.send": "the writer tells its trainer something",
}
"""Steps of a save by the function that takes them; one without words goes by its own name."""
