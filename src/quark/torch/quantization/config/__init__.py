"""Configuration of the torch flow."""
