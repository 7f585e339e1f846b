"""Settings of an export, where transformers imports them from."""
