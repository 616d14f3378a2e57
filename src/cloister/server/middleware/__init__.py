"""Middleware around every route. Pure ASGI, so that a disconnect is seen at once."""
