"""The programs of the private cloud as ASGI apps: relay, gateway, node, issuer, witness."""
