"""Middleware around every route. Pure ASGI, so that a disconnect is noticed immediately."""
