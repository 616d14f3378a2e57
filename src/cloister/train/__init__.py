"""Trains draft heads and draft models for a served model, whose weights stay frozen. torch may be imported here."""
