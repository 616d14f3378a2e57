"""The Messages API of Anthropic: a conversation in blocks."""
