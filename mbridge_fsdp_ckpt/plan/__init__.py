"""Where every piece of every tensor belongs: integers and names, no process group, no Megatron."""
