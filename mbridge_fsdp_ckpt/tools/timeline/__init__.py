"""Who took how long in a save: ranks and phases, from what each rank has written of itself."""
