"""What inductor's generated code holds, read off its text: for a compiled recipe, by any torch, without a GPU."""
