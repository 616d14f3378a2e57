"""OpenAI's Responses API. `keeping` stores responses between requests."""
