"""Files and batches of the OpenAI API: sealed on disk, found by their owner only, gone after their time."""
