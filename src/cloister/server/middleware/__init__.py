"""What every request passes before and after its route. Pure ASGI, so that a disconnect is seen when it happens."""
