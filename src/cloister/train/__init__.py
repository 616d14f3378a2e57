"""Training for a served model, its weights frozen: heads that draft, and small models that do. torch may be imported here."""
