"""The HTTP server: APIs of OpenAI, Anthropic, Ollama and llama.cpp, limits, streams and metrics. `app.create_app` builds it,
`serve.serve` runs it."""
