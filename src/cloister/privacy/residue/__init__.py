"""What a node leaves behind: marked prompts, and a search of its memory and files from outside."""
