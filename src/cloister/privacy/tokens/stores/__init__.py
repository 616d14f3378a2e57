"""Spend stores, one file each; `spend.open_spend_store` picks one, so that only the chosen one's library is imported."""
