"""The HTTP server: OpenAI-compatible routes, limits, streams and metrics. `app.create_app` builds it, `serve.serve` runs it."""
