"""The command: options, questions and printing.

What a command does lies in `care` and `convert`, and is imported when it is done: to show a help takes no torch.
"""
