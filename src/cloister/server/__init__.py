"""The OpenAI-compatible HTTP front: routes, limits, streams and metrics. `app.create_app` makes it, `serve.serve` runs it."""
