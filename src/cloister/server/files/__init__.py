"""Files and batches of the OpenAI API: encrypted on disk, visible to their owner only, deleted on expiry."""
