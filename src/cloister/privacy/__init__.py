"""Who may ask, what may be switched on, and what may be kept."""
