"""The demo: a trained network, real digits, three quantizations and a table. ``python -m quark.demo`` runs it."""
