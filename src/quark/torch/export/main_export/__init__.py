"""Names that transformers imports."""
